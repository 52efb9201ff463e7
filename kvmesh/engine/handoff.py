"""An engine's end of a KV hand-off: tickets out, tickets in, leases between."""

import asyncio
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.clock import Clock
from kvmesh.errors import TicketError
from kvmesh.kv.base import KvTransport
from kvmesh.kv.ledger import Lease, Ledger
from kvmesh.types import KvTicket

_PARAMS = struct.Struct("<BBQI")  # revision, bytes of the epoch, digest of the prompt, blocks
_REVISION = 1
_SWEEP_SECONDS = 0.001  # a timer may fire a little before its time


@dataclass(frozen=True, slots=True)
class Offer:
    """A ticket's engine part: the blocks in order, and the digest they must have."""

    epoch: str
    digest: int
    blocks: Sequence[int]
    peer: bytes

    def pack(self) -> bytes:
        """Return it as `KvTicket.engine_params`."""
        epoch = self.epoch.encode()
        head = _PARAMS.pack(_REVISION, len(epoch), self.digest, len(self.blocks))
        return head + epoch + array("I", self.blocks).tobytes() + self.peer


def unpack(params: bytes) -> Offer:
    """Return what `Offer.pack` made. Raises `TicketError` for anything else."""
    try:
        revision, epoch_bytes, digest, count = _PARAMS.unpack_from(params)
        if revision != _REVISION:
            raise TicketError(f"the ticket has revision {revision}, this engine reads {_REVISION}")
        at = _PARAMS.size + epoch_bytes
        blocks = array("I", params[at : at + 4 * count])
        if len(blocks) != count:
            raise TicketError("the ticket's engine parameters are cut short")
        return Offer(params[_PARAMS.size : at].decode(), digest, blocks, params[at + 4 * count :])
    except (struct.error, ValueError) as error:
        raise TicketError("the ticket's engine parameters are not this engine's") from error


def came_first(ticket: KvTicket) -> bool:
    """Whether a ticket was given out before its prompt was computed: it has no first token."""
    return not ticket.first_token_ids


@dataclass(frozen=True, slots=True)
class Terms:
    """What all tickets of one engine say, and what it asks of those it gets."""

    engine: str
    backend: str
    worker_id: str
    epoch: str
    layout_fingerprint: str
    block_size: int
    block_bytes: int
    lease_seconds: float
    wait_seconds: float
    pull_timeout_seconds: float


class Handoff:
    """The leases of one engine and its pulls. `free` gets the blocks of a lease that ended.

    The owner of `transport` calls `on_pulled` for it, and `close` before closing it.
    """

    def __init__(
        self,
        terms: Terms,
        transport: KvTransport,
        clock: Clock,
        free: Callable[[Sequence[int]], None],
    ) -> None:
        self.ledger = Ledger(terms.block_bytes)
        self.received_bytes = 0
        self.received_seconds = 0.0
        self._terms = terms
        self._transport = transport
        self._clock = clock
        self._free = free
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, blocks: Sequence[int], tokens: Sequence[int], digest: int) -> KvTicket:
        """Lease held blocks of a prompt to whoever gets the ticket returned.

        `tokens` are the prompt and, last, the token that prefill sampled.
        """
        ticket = self._ticket(blocks, len(tokens) - 1, digest, tokens[-1:])
        self._lease(ticket.ticket_id, blocks)
        return ticket

    def announce(self, blocks: Sequence[int], prompt_tokens: int, digest: int) -> KvTicket:
        """Return the ticket of a prompt that will be computed into blocks: its lease begins then.

        Until `fulfil` or `withdraw` the blocks are the caller's.
        """
        return self._ticket(blocks, prompt_tokens, digest)

    def fulfil(self, ticket_id: str, blocks: Sequence[int]) -> None:
        """Lease an announced ticket's blocks, which are computed now."""
        self._lease(ticket_id, blocks)
        self._transport.fulfil(ticket_id)

    def withdraw(self, ticket_id: str) -> None:
        """End an announced ticket: whoever waits for it fails."""
        self._transport.withdraw(ticket_id)

    def _ticket(
        self,
        blocks: Sequence[int],
        prompt_tokens: int,
        digest: int,
        first_token_ids: Sequence[int] = (),
    ) -> KvTicket:
        terms, whole = self._terms, bool(first_token_ids)
        self._count += 1
        ticket_id = f"{terms.epoch[:12]}-{self._count}"
        peer = self._transport.offer(ticket_id, whole=whole)
        seconds = terms.lease_seconds if whole else terms.wait_seconds
        return KvTicket(
            ticket_id=ticket_id,
            worker_id=terms.worker_id,
            epoch=terms.epoch,
            backend=terms.backend,
            engine=terms.engine,
            layout_fingerprint=terms.layout_fingerprint,
            prompt_tokens=prompt_tokens,
            block_count=len(blocks),
            byte_count=len(blocks) * terms.block_bytes,
            lease_expire_time=self._clock.wall() + seconds,
            first_token_ids=tuple(first_token_ids),
            engine_params=Offer(terms.epoch, digest, blocks, peer).pack(),
        )

    def release(self, ticket_id: str) -> bool:
        """Free the blocks of a ticket; False if it is not held."""
        return self._ended(self.ledger.release(ticket_id))

    def on_pulled(self, ticket_id: str) -> None:
        """Free the blocks of a ticket that was pulled."""
        self._ended(self.ledger.release(ticket_id))

    def check(self, ticket: KvTicket, prompt_tokens: int) -> Offer:
        """Return what a ticket offers. Raises `TicketError` if it can't be honoured here."""
        terms = self._terms
        if (ticket.engine, ticket.backend) != (terms.engine, terms.backend):
            raise TicketError(
                f"the ticket is for {ticket.engine} over {ticket.backend}, "
                f"this is {terms.engine} over {terms.backend}"
            )
        if ticket.layout_fingerprint != terms.layout_fingerprint:
            raise TicketError("the ticket's KV has another layout than this engine's")
        if ticket.prompt_tokens != prompt_tokens:
            raise TicketError(
                f"the ticket is for {ticket.prompt_tokens} prompt tokens, not {prompt_tokens}"
            )
        offer = unpack(ticket.engine_params)
        if offer.epoch != ticket.epoch:
            raise TicketError("the ticket is from another life of its holder")
        if len(offer.blocks) != -(-prompt_tokens // terms.block_size):
            raise TicketError(f"{len(offer.blocks)} blocks do not fit {prompt_tokens} tokens")
        self.time_left(ticket)
        return offer

    def time_left(self, ticket: KvTicket) -> float:
        """Return seconds until the lease ends, above 0. Raises `TicketError` after it."""
        left = ticket.lease_expire_time - self._clock.wall()
        if left <= 0:
            raise TicketError("the ticket's lease has expired")
        return left

    async def computed(self, ticket: KvTicket) -> None:
        """Wait until a ticket's prompt is computed. Raises what `KvTransport.whole` does."""
        timeout = self.time_left(ticket)
        await self._transport.whole(unpack(ticket.engine_params).peer, timeout=timeout)

    async def pull(self, ticket: KvTicket, blocks: Sequence[int], skip: int) -> None:
        """Pull a ticket's blocks behind the first `skip`, which are here, into `blocks`."""
        timeout = min(self.time_left(ticket), self._terms.pull_timeout_seconds)
        offer = unpack(ticket.engine_params)
        pulled = await self._transport.pull(
            offer.peer, offer.blocks[skip:], blocks, timeout=timeout
        )
        self.received_bytes += pulled.byte_count
        self.received_seconds += pulled.seconds

    def close(self) -> None:
        """End all leases. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lease in self.ledger.clear():
            self._ended(lease)

    def _lease(self, ticket_id: str, blocks: Sequence[int]) -> None:
        seconds = self._terms.lease_seconds
        self.ledger.add(Lease(ticket_id, blocks, self._clock.now() + seconds))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._sweep)

    def _ended(self, lease: Lease | None) -> bool:
        if lease is None:
            return False
        self._transport.withdraw(lease.ticket_id)  # before the blocks can be used again
        self._free(lease.blocks)
        return True

    def _sweep(self) -> None:
        """Free what has run out, and come back for the next."""
        self._timer = None
        for lease in self.ledger.expire(self._clock.now()):
            self._ended(lease)
        expires = self.ledger.next_expiry
        if expires is not None:
            delay = max(expires - self._clock.now(), _SWEEP_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self._sweep)
