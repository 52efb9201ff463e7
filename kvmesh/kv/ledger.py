"""Who may still pull which blocks: the leases behind KV tickets, as pure bookkeeping."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks kept for one ticket until `expires`, on the caller's steady clock."""

    ticket_id: str
    blocks: Sequence[int]
    expires: float


class Ledger:
    """The leases of one worker. Each ends once: released or expired.

    Whoever ends a lease gets it back and frees its blocks. Never blocks; one task uses it.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._leases: dict[str, Lease] = {}
        self._held: Counter[int] = Counter()

    @property
    def blocks(self) -> int:
        """Distinct blocks under lease: a prefix that two tickets share counts once."""
        return len(self._held)

    @property
    def byte_count(self) -> int:
        """Bytes of these blocks."""
        return len(self._held) * self._block_bytes

    @property
    def next_expiry(self) -> float | None:
        """When the next lease runs out; None when there is none."""
        return min((lease.expires for lease in self._leases.values()), default=None)

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._leases)

    def add(self, lease: Lease) -> None:
        """Keep a lease. Raises `ValueError` for a ticket that is held already."""
        if lease.ticket_id in self._leases:
            raise ValueError(f"ticket {lease.ticket_id} is held already")
        self._leases[lease.ticket_id] = lease
        self._held.update(lease.blocks)

    def release(self, ticket_id: str) -> Lease | None:
        """End a lease, used or not. None if it had ended already."""
        return self._end(ticket_id) if ticket_id in self._leases else None

    def expire(self, now: float) -> list[Lease]:
        """End all leases that have run out."""
        late = [lease.ticket_id for lease in self._leases.values() if now >= lease.expires]
        return [self._end(ticket_id) for ticket_id in late]

    def clear(self) -> list[Lease]:
        """End all leases."""
        return [self._end(ticket_id) for ticket_id in list(self._leases)]

    def _end(self, ticket_id: str) -> Lease:
        lease = self._leases.pop(ticket_id)
        for block in lease.blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        return lease
