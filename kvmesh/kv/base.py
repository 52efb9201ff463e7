"""The contract for moving KV blocks between engines, out of band.

One suite, `tests/contract/test_kv_transport.py`, runs on every implementation.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.errors import TransferError

OnPulled = Callable[[str], bool]
"""Called in the holder's event loop when a peer has copied a ticket's blocks.

Gets the ticket's id, says whether the ticket was held until now. Called once for each
pull; the first True frees the blocks, and what later pulls copied is void.
"""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A block pool as memory: `total_blocks` blocks of `block_bytes` bytes, back to back."""

    total_blocks: int
    block_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the whole pool."""
        return self.total_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one pull moved, and how long it took, the holder's consent included."""

    byte_count: int
    seconds: float


class StillWritingError(TransferError):
    """A pull that ended before its transfer did: the blocks can't be used again yet.

    `settled` is done, with no result, when nothing writes to them any more: the peer went
    on, is known to be gone, or the transport was closed.
    """

    def __init__(self, message: str, settled: asyncio.Future[None]) -> None:
        super().__init__(message)
        self.settled = settled


class KvTransport(Protocol):
    """Moves blocks between this process's pool and its peers' pools of the same layout.

    Made over one pool, it both lets peers pull from it and pulls into it. Whoever opened
    it closes it. Pulls run side by side.
    """

    @property
    def backend(self) -> str:
        """Name that both ends must share, as in `KvTicket.backend`."""
        ...

    def describe(self) -> bytes:
        """Return what a peer needs to pull from here; it travels in tickets, unread."""
        ...

    async def pull(
        self,
        peer: bytes,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        ticket_id: str,
        timeout: float,
    ) -> Pulled:
        """Copy `remote_blocks` of the peer into `local_blocks`, one to one, and end the ticket.

        When it returns, the blocks are whole and the holder's `on_pulled` has said True.
        Raises `TicketError` when the peer is another life than described or does not hold
        the ticket, `TransferError` when blocks could not be moved within `timeout` seconds;
        what is in `local_blocks` then is void. No blocks is a pull too: it ends the ticket.

        However it ends, by cancellation too, nothing writes to `local_blocks` afterwards, but
        for one case: `StillWritingError`, raised a second after the time is up, or after a
        cancellation in its place, while a peer neither sends nor fails. Keep the blocks then.
        """
        ...

    async def aclose(self) -> None:
        """Stop serving peers, fail pulls in flight with `TransferError`. Idempotent."""
        ...
