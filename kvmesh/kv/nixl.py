"""KV transport over NIXL: one-sided reads of a peer's registered pool, on any host.

One agent for each life, named by its epoch, so that a restarted peer is a new one. What
`describe` returns is all that peers need; there is no server and no port of our own.

After reading, the puller reads the holder's board (see `kvmesh.kv.board`): only an open
ticket makes the copy valid.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from kvmesh.clock import Clock
from kvmesh.errors import TicketError, TransferError
from kvmesh.kv.base import OnPulled, Pulled, StillWritingError
from kvmesh.kv.board import BOARD_BYTES, Board, word_of
from kvmesh.kv.looking import await_whole
from kvmesh.kv.nixl_messages import Region, Site, parse_offer
from kvmesh.kv.nixl_thread import AgentThread, Job

BACKEND = "nixl"

_SETTLE_SECONDS = 1.0  # a piece of a pull takes far less, unless the holder stands still


class NixlTransport:
    """A `KvTransport` over registered memory. Made in a running loop, for up to half a second.

    `on_closed` is called once nobody reads or writes the memory any more.
    """

    def __init__(
        self,
        region: Region,
        epoch: str,
        clock: Clock,
        on_pulled: OnPulled,
        on_closed: Callable[[], None],
    ) -> None:
        self._region = region
        self._clock = clock
        self._on_pulled = on_pulled
        self._on_closed = on_closed
        self._closed = False
        self._words = np.zeros(BOARD_BYTES, np.uint8)
        self._board = Board(self._words.data)
        words = self._words.ctypes.data
        self._thread = AgentThread(
            f"kvmesh-{epoch}", region, self._board, words, clock, self._on_used
        )
        self._site = Site(epoch, region, words, self._thread.metadata)

    @property
    def backend(self) -> str:
        """`nixl`."""
        return BACKEND

    def offer(self, ticket_id: str, *, whole: bool = True) -> bytes:
        """Open a ticket; return where this pool is: epoch, layout, addresses and metadata."""
        if self._closed:
            raise TransferError("the transport is closed")
        self._thread.expect()
        return self._site.offer(self._board.open(ticket_id, whole=whole))

    def fulfil(self, ticket_id: str) -> None:
        """Say that a ticket's blocks are whole."""
        if not self._closed:
            self._thread.expect()
            self._board.fulfil(ticket_id)

    def withdraw(self, ticket_id: str) -> None:
        """Close a ticket, as `KvTransport.withdraw` promises."""
        if not self._closed:
            self._board.close(ticket_id)

    async def whole(self, offer: bytes, *, timeout: float) -> None:
        """Wait for a peer, as `KvTransport.whole` promises."""
        site, number = parse_offer(offer)
        await await_whole(lambda: self._look(site, number), number, timeout, self._clock)

    async def pull(
        self,
        offer: bytes,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout: float,
    ) -> Pulled:
        """Read blocks from a peer, as `KvTransport.pull` promises."""
        started = self._clock.now()
        if self._closed:
            raise TransferError("the transport is closed")
        site, number = parse_offer(offer)
        self._check(site, remote_blocks, local_blocks)
        job = _job(site, number, remote_blocks, local_blocks)
        self._thread.start(job)
        try:
            async with asyncio.timeout(timeout):
                word = await job.outcome
        except TimeoutError as error:
            await self._abandon(job)
            raise TransferError(f"the blocks did not come within {timeout:g} s") from error
        except asyncio.CancelledError:
            await self._abandon(job)
            raise
        if word != word_of(number):
            raise TicketError("the holder does not hold this ticket any more")
        moved = len(local_blocks) * self._region.layout.block_bytes
        return Pulled(moved, self._clock.now() - started)

    async def aclose(self) -> None:
        """End the agent, which stops serving peers, and let go of the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._thread.aclose()
        self._board.release()
        self._words = np.empty(0, np.uint8)  # now, not when cycles are collected
        self._on_closed()

    def _check(self, site: Site, remote: Sequence[int], local: Sequence[int]) -> None:
        ours, theirs = self._region.layout, site.region.layout
        if len(remote) != len(local):
            raise ValueError(f"{len(remote)} remote blocks for {len(local)} local ones")
        if theirs.block_bytes != ours.block_bytes:
            raise TicketError("the holder's blocks have another size")
        if remote and not 0 <= min(remote) <= max(remote) < theirs.total_blocks:
            raise TicketError("the ticket names blocks that its holder does not have")

    async def _look(self, site: Site, number: int) -> int:
        if self._closed:
            raise TransferError("the transport is closed")
        job = _job(site, number, uses=False)
        self._thread.start(job)
        try:
            return await job.outcome
        except asyncio.CancelledError:
            self._thread.abandon(job)  # it writes to no block
            raise

    async def _abandon(self, job: Job) -> None:
        """Stop a pull. Raises `StillWritingError` when its read doesn't end soon."""
        self._thread.abandon(job)
        due = self._clock.now() + _SETTLE_SECONDS
        while not job.settled.done() and (left := due - self._clock.now()) > 0:
            try:
                await asyncio.wait([job.settled], timeout=left)
            except asyncio.CancelledError:
                continue  # it comes to the same: the caller's blocks are being written to
        if not job.settled.done():
            job.stuck = True
            raise StillWritingError("the holder stands still in the middle of a read", job.settled)

    def _on_used(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            ticket_id = self._board.ticket(number)
            if ticket_id is not None and not self._closed:
                self._board.close(ticket_id)
                self._on_pulled(ticket_id)


def _job(
    site: Site,
    number: int,
    remote: Sequence[int] = (),
    local: Sequence[int] = (),
    *,
    uses: bool = True,
) -> Job:
    loop = asyncio.get_running_loop()
    return Job(
        site,
        np.array(remote, np.int32),
        np.array(local, np.int32),
        number,
        loop.create_future(),
        loop.create_future(),
        uses,
    )
