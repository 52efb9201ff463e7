"""The contract for moving KV blocks between engines, out of band.

One suite, `tests/contract/test_kv_transport.py`, runs on every implementation.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.errors import TransferError

OnPulled = Callable[[str], None]
"""Called in the holder's event loop soon after a peer has copied an open ticket's blocks.

Gets the ticket's id, once; the blocks can be freed. Of a peer that dies just then nothing
is heard: whoever opens a ticket ends it by himself after a while.
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
    """What one pull moved, and how long it took."""

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

    def offer(self, ticket_id: str, *, whole: bool = True) -> bytes:
        """Open a ticket, and return what a peer needs to pull by it; it travels unread.

        One that is not `whole` has blocks that are still being computed: no pull by it
        succeeds before `fulfil`. Raises `TransferError` when closed.
        """
        ...

    def fulfil(self, ticket_id: str) -> None:
        """Say that the blocks of a ticket are whole. No effect on one that is not open."""
        ...

    def withdraw(self, ticket_id: str) -> None:
        """Close a ticket: no pull by it succeeds from now on, not even one that runs.

        To be called before its blocks are used for anything else, pulled or not. No effect
        on one that is not open.
        """
        ...

    async def whole(self, offer: bytes, *, timeout: float) -> None:
        """Wait until the blocks of a ticket are whole. Nothing is copied or used up.

        Raises `TicketError` when the peer is another life than offered or the ticket is not
        open, `TransferError` when its blocks are not whole within `timeout` seconds or the
        peer is gone.
        """
        ...

    async def pull(
        self,
        offer: bytes,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout: float,
    ) -> Pulled:
        """Copy `remote_blocks` of the peer into `local_blocks`, one to one, and use the ticket up.

        When it returns, the blocks are whole: the ticket was open after they were copied.
        Raises `TicketError` when the peer is another life than offered or the ticket is not
        open and whole, `TransferError` when blocks could not be moved within `timeout`
        seconds; what is in `local_blocks` then is void. No blocks is a pull too. Of two pulls
        by one ticket at the same instant both may succeed: both have copied the same blocks.

        However it ends, by cancellation too, nothing writes to `local_blocks` afterwards, but
        for one case: `StillWritingError`, raised a second after the time is up, or after a
        cancellation in its place, while a peer neither sends nor fails. Keep the blocks then.
        """
        ...

    async def aclose(self) -> None:
        """Stop serving peers, fail pulls in flight with `TransferError`. Idempotent."""
        ...
