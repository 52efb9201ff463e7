"""KV transport between processes of one host: a shared pool, read in place by peers.

The pool is an anonymous memory file that peers open through `/proc/<pid>/fd/<n>`, so
nothing is left behind however a process ends. Its first page names the epoch: a
recycled pid is never trusted. Peers must share user, pid and network namespace.

After copying, the puller looks at the holder's board (see `kvmesh.kv.board`): only an open
ticket makes the copy valid.
"""

import asyncio
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvmesh.clock import Clock
from kvmesh.errors import TicketError, TransferError
from kvmesh.kv.base import OnPulled, PoolLayout, Pulled
from kvmesh.kv.board import CLOSED, WORD_BYTES, Board, read_word, slot_of, word_of
from kvmesh.kv.looking import await_whole
from kvmesh.kv.notices import NoticeDesk
from kvmesh.kv.shared import BLOCKS_AT, BOARD_AT, SharedPool, header

BACKEND = "local"

_COPY_IN_LOOP_BYTES = 1 << 20  # about 0.1 ms of copying; more goes to a thread
_COPY_CALL_BYTES = 1 << 28  # one preadv; the kernel moves at most 2 GiB in a call
_COPY_CALL_BLOCKS = 1024  # IOV_MAX


@dataclass(frozen=True, slots=True)
class _Offer:
    pid: int
    fd: int
    epoch: str
    layout: PoolLayout
    number: int

    def pack(self) -> bytes:
        return json.dumps(
            {
                "pid": self.pid,
                "fd": self.fd,
                "epoch": self.epoch,
                "total_blocks": self.layout.total_blocks,
                "block_bytes": self.layout.block_bytes,
                "number": self.number,
            }
        ).encode()

    @classmethod
    def parse(cls, offer: bytes) -> "_Offer":
        try:
            raw = json.loads(offer)
            layout = PoolLayout(int(raw["total_blocks"]), int(raw["block_bytes"]))
            pid, fd, number = int(raw["pid"]), int(raw["fd"]), int(raw["number"])
            return cls(pid, fd, str(raw["epoch"]), layout, number)
        except (ValueError, KeyError, TypeError) as error:
            raise TicketError("the ticket does not describe a local pool") from error


class LocalTransport:
    """A `KvTransport` over a `SharedPool`, which it closes too. Made in a running loop."""

    def __init__(self, pool: SharedPool, clock: Clock, on_pulled: OnPulled) -> None:
        self._pool = pool
        self._clock = clock
        self._on_pulled = on_pulled
        self._copies: set[asyncio.Future[None]] = set()
        self._closed = False
        self._desk = NoticeDesk(pool.epoch, self._hear)
        self._board = Board(pool.board)

    @property
    def backend(self) -> str:
        """`local`."""
        return BACKEND

    def offer(self, ticket_id: str, *, whole: bool = True) -> bytes:
        """Open a ticket; return where this pool is: process, descriptor, epoch and layout."""
        if self._closed:
            raise TransferError("the transport is closed")
        pool = self._pool
        number = self._board.open(ticket_id, whole=whole)
        return _Offer(os.getpid(), pool.fd, pool.epoch, pool.layout, number).pack()

    def fulfil(self, ticket_id: str) -> None:
        """Say that a ticket's blocks are whole."""
        if not self._closed:
            self._board.fulfil(ticket_id)

    def withdraw(self, ticket_id: str) -> None:
        """Close a ticket, as `KvTransport.withdraw` promises."""
        if not self._closed:
            self._board.close(ticket_id)

    async def whole(self, offer: bytes, *, timeout: float) -> None:
        """Wait for a peer of this host, as `KvTransport.whole` promises."""
        source = _Offer.parse(offer)

        async def look() -> int:
            if self._closed:
                raise TransferError("the transport is closed")
            with _Opened(source) as fd:
                return _look(fd, source.number)

        try:
            await await_whole(look, source.number, timeout, self._clock)
        except OSError as error:
            raise TransferError(f"the holder is gone: {error.strerror}") from error

    async def pull(
        self,
        offer: bytes,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout: float,
    ) -> Pulled:
        """Copy blocks from a peer of this host, as `KvTransport.pull` promises."""
        started = self._clock.now()
        if self._closed:
            raise TransferError("the transport is closed")
        source = self._check(_Offer.parse(offer), remote_blocks, local_blocks)
        try:
            async with asyncio.timeout(timeout):
                with _Opened(source) as fd:
                    await self._copy(fd, remote_blocks, local_blocks)
                    _use_up(fd, source.number)
        except TimeoutError as error:
            raise TransferError(f"the blocks did not come within {timeout:g} s") from error
        except OSError as error:
            raise TransferError(f"the holder is gone: {error.strerror}") from error
        self._desk.tell(source.epoch, source.number)
        moved = len(local_blocks) * self._pool.layout.block_bytes
        return Pulled(moved, self._clock.now() - started)

    async def aclose(self) -> None:
        """Stop hearing peers and unmap the pool once no copy runs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._desk.close()
        self._board.release()
        while self._copies:
            await asyncio.wait(self._copies)
        self._pool.close()

    def _hear(self, number: int) -> None:
        ticket_id = self._board.ticket(number)
        if ticket_id is not None:
            self._board.close(ticket_id)
            self._on_pulled(ticket_id)

    def _check(self, peer: _Offer, remote: Sequence[int], local: Sequence[int]) -> _Offer:
        if len(remote) != len(local):
            raise ValueError(f"{len(remote)} remote blocks for {len(local)} local ones")
        if peer.layout.block_bytes != self._pool.layout.block_bytes:
            raise TicketError("the holder's blocks have another size")
        if remote and not 0 <= min(remote) <= max(remote) < peer.layout.total_blocks:
            raise TicketError("the ticket names blocks that its holder does not have")
        return peer

    async def _copy(self, fd: int, remote: Sequence[int], local: Sequence[int]) -> None:
        if len(local) * self._pool.layout.block_bytes <= _COPY_IN_LOOP_BYTES:
            _read_blocks(fd, self._pool, remote, local)
            return
        copy = asyncio.ensure_future(asyncio.to_thread(_read_blocks, fd, self._pool, remote, local))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        try:
            await asyncio.shield(copy)
        except asyncio.CancelledError:
            # The thread writes to blocks that the caller frees next: stay until it is done.
            while not copy.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([copy])
            copy.exception()  # seen; the cancellation is what counts
            raise


class _Opened:
    """A peer's pool, open and proven to be of the life it claims."""

    def __init__(self, peer: _Offer) -> None:
        self._peer = peer
        self._fd = -1

    def __enter__(self) -> int:
        # Without O_NONBLOCK a recycled pid's pipe could hold us here.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(f"/proc/{self._peer.pid}/fd/{self._peer.fd}", flags)
        if not self._is_pool():
            os.close(self._fd)
            raise TicketError("the ticket is from an earlier life of its holder")
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _is_pool(self) -> bool:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            return False
        first = header(self._peer.epoch, self._peer.layout)
        return os.pread(self._fd, len(first), 0) == first


def _use_up(fd: int, number: int) -> None:
    """Close the ticket of a number in its holder's board. `TicketError` unless it is open."""
    if _look(fd, number) != word_of(number):
        raise TicketError("the holder does not hold this ticket any more")
    os.pwrite(fd, CLOSED, BOARD_AT + slot_of(number) * WORD_BYTES)


def _look(fd: int, number: int) -> int:
    return read_word(os.pread(fd, WORD_BYTES, BOARD_AT + slot_of(number) * WORD_BYTES))


def _read_blocks(fd: int, pool: SharedPool, remote: Sequence[int], local: Sequence[int]) -> None:
    size = pool.layout.block_bytes
    most = max(1, min(_COPY_CALL_BLOCKS, _COPY_CALL_BYTES // size))
    for start, stop in _runs(remote, most):
        into = [pool.memory[block * size : (block + 1) * size] for block in local[start:stop]]
        if os.preadv(fd, into, BLOCKS_AT + remote[start] * size) != (stop - start) * size:
            raise TransferError("the holder's pool ended early")


def _runs(blocks: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of stretches of neighbours in `blocks`, each of at most `most`."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at < len(blocks) and blocks[at] == blocks[at - 1] + 1 and at - start < most:
            continue
        yield start, at
        start = at
