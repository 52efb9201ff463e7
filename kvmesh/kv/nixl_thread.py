"""The thread that owns a NIXL agent: reads blocks, serves and sees peers, sleeps in between.

NIXL moves nothing by itself: what peers want of this process waits until somebody calls, and
which tickets they have used until somebody looks. So the thread does both every 0.1 ms while
something is going on and ever more rarely, down to once in 40 ms, when nothing is.
"""

import asyncio
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import Clock
from kvmesh.errors import MeshError, TicketError, TransferError
from kvmesh.kv.board import Board, word_of
from kvmesh.kv.nixl_agent import Agent, Indices, Source, Transfer
from kvmesh.kv.nixl_messages import PING, Region, Site

log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 25  # one read: about 5 ms on one host, in which nobody is served
_TURN_SECONDS = 0.002  # of one pull; then others have theirs
_READING_SECONDS = 0.0002  # between two looks at reads that run by themselves
_PATIENCE_SECONDS = 0.05  # before a holder that nothing comes from is written to
_BUSY_SECONDS = 0.0001
_IDLE_SECONDS = 0.04
_IDLE_SHARE = 0.02  # of the time since something went on: 2 s until it is idle
_CLOSE_SECONDS = 1.0  # for reads under way: to cut one off can upset its holder
_MAX_PEERS = 256  # known at a time; the longest unused is forgotten first


@dataclass(slots=True)
class _Peer:
    """A known agent, and its pool as it is read."""

    name: str
    source: Source
    broken: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """One pull, or a look. Both futures are of the event loop, where the thread sets them.

    `outcome` is the ticket's word after the blocks were copied, `settled` that nothing is
    written any more. `uses`: a ticket that is whole then is used up. `stuck` is set by the
    loop when it waits no longer for a read that doesn't end.
    """

    site: Site
    remote: Indices
    local: Indices
    number: int
    outcome: asyncio.Future[int]
    settled: asyncio.Future[None]
    uses: bool = True
    stuck: bool = False
    abandoned: bool = False
    word: int = 0
    waited: float = 0.0
    peer: _Peer | None = field(default=None, repr=False)
    transfer: Transfer | None = field(default=None, repr=False)
    transfers: Iterator[Transfer] = field(default=iter(()), repr=False)


OnUsed = Callable[[Sequence[int]], None]
"""Gets the numbers of tickets that peers have used up, in the event loop; perhaps repeatedly."""


class AgentThread:
    """Runs jobs until closed. Made in a running event loop, and used from it alone."""

    def __init__(
        self, name: str, region: Region, board: Board, words: int, clock: Clock, on_used: OnUsed
    ) -> None:
        """Start the agent, which takes up to half a second. Raises `TransferError`.

        `words` is the address of the board's memory.
        """
        self._name = name
        self._region = region
        self._clock = clock
        self._board = board
        self._words = words
        self._on_used = on_used
        self._loop = asyncio.get_running_loop()
        # Bounded by the pulls in flight: at most two for each.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._closing: float | None = None
        self._active = clock.now()
        self._piece = max(1, _PIECE_BYTES // region.layout.block_bytes)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._pulling: list[Job] = []
        started: Future[Agent] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(started,), name="nixl", daemon=True
        )
        self._thread.start()
        self._agent = started.result()
        self.metadata = self._agent.metadata

    def start(self, job: Job) -> None:
        """Run a job."""
        self._post(lambda: self._start(job))

    def abandon(self, job: Job) -> None:
        """Stop a job as soon as its read, if there is one, has ended."""
        self._post(lambda: self._abandon(job))

    def expect(self) -> None:
        """Be attentive: a peer will come soon."""
        self._active = self._clock.now()

    async def aclose(self) -> None:
        """Fail all jobs, and end the agent: nothing is written any more. Idempotent."""
        self._post(self._close)
        await self._ended.wait()
        self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        if self._ended.is_set():
            self._drain()

    def _drain(self) -> None:
        """Do what is left, by now without an agent."""
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _in_loop(self, call: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop was closed before this was
            self._loop.call_soon_threadsafe(call, *args)

    # Everything below runs in the thread, and after its end in the loop.

    def _main(self, started: "Future[Agent]") -> None:
        try:
            agent = self._agent = Agent(self._name, self._region, self._words)
        except Exception as error:  # noqa: BLE001 - top of a task: raised where it was made
            started.set_exception(error)
            return
        started.set_result(agent)
        try:
            self._serve()
        except Exception:  # the top of a background task
            log.exception("the nixl thread died")
        finally:
            self._shut()
            self._in_loop(self._end)

    def _serve(self) -> None:
        while self._closing is None or (self._pulling and self._clock.now() < self._closing):
            with suppress(queue.Empty):
                self._commands.get(timeout=self._pause())()
                self._active = self._clock.now()
                while True:
                    self._commands.get_nowait()()
            self._listen()
            for job in tuple(self._pulling):
                self._advance(job)

    def _pause(self) -> float:
        moving = [job for job in self._pulling if not job.stuck]
        if moving:
            waiting = all(job.transfer is not None and not job.transfer.done for job in moving)
            return _READING_SECONDS if waiting else 0.0
        idle = self._clock.now() - self._active
        return min(max(idle * _IDLE_SHARE, _BUSY_SECONDS), _IDLE_SECONDS)

    def _listen(self) -> None:
        """Serve peers, and see which tickets they have used."""
        if self._agent.receive():
            self._active = self._clock.now()
        if used := self._board.used():
            self._active = self._clock.now()
            self._in_loop(self._on_used, used)

    def _start(self, job: Job) -> None:
        try:
            if self._closing is not None:
                raise TransferError("the transport was closed")
            job.peer = self._meet(job.site)
        except MeshError as error:
            self._fail(job, error)
            self._settle(job)
            return
        job.transfers = self._transfers(job, job.peer.source)
        self._pulling.append(job)
        self._advance(job)

    def _meet(self, site: Site) -> _Peer:
        """Return a peer, known or new."""
        name = f"kvmesh-{site.epoch}"
        peer = self._peers.get(name)
        if peer is None:
            if name != self._name and self._agent.add(site.metadata) != name:
                raise TicketError("the ticket names another holder than its metadata")
            peer = self._peers[name] = _Peer(name, self._agent.prepare(name, site))
            for other in list(self._peers.values())[:-_MAX_PEERS]:
                self._forget(other)
        if peer.broken:
            raise TransferError("the holder is gone")
        if any(job.stuck and job.peer is peer for job in self._pulling):
            raise TransferError("the holder has not answered an earlier pull yet")
        self._peers.move_to_end(name)
        return peer

    def _forget(self, peer: _Peer) -> None:
        """Drop a peer, now or when no job uses it any more."""
        if any(job.peer is peer for job in self._pulling):
            return
        if self._peers.get(peer.name) is not peer:
            return
        del self._peers[peer.name]
        with suppress(TransferError):  # it is gone already: then there is nothing to undo
            self._agent.forget(peer.source)
            if peer.name != self._name:
                self._agent.remove(peer.name)

    def _transfers(self, job: Job, source: Source) -> Iterator[Transfer]:
        """Start a pull's transfers, each when the one before is done."""
        agent = self._agent
        for at in range(0, len(job.local), self._piece):
            stop = at + self._piece
            yield agent.read(source, job.remote[at:stop], job.local[at:stop])
        transfer, place = agent.look(source, job.number)
        yield transfer
        job.word = agent.seen(place)
        if job.uses and job.word == word_of(job.number):
            yield agent.mark(source, job.number)

    def _advance(self, job: Job) -> None:
        """Go on with a pull as far as it goes without waiting, or for the time of a piece."""
        peer = job.peer
        assert peer is not None
        due = self._clock.now() + _TURN_SECONDS
        try:
            while job.transfer is None or self._agent.check(job.transfer):
                self._release(job)
                job.transfer = None if job.abandoned else next(job.transfers, None)
                if job.transfer is None:
                    self._finish(job)
                    return
                if self._clock.now() > due:
                    return
            self._waken(job, peer)
        except TransferError as error:
            peer.broken = True
            # After its word was seen, nothing is missing but the holder's knowing of it.
            self._finish(job, None if job.word else error)

    def _waken(self, job: Job, peer: _Peer) -> None:
        """Make a holder attentive that keeps a pull waiting. No more often: reads wait for that."""
        if not job.waited:
            job.waited = self._clock.now()
        elif self._clock.now() > job.waited + _PATIENCE_SECONDS:
            job.waited = self._clock.now()
            self._agent.send(peer.name, PING)

    def _finish(self, job: Job, error: TransferError | None = None) -> None:
        """Let go of a pull, and say how it ended."""
        peer = job.peer
        assert peer is not None
        self._release(job)
        self._pulling.remove(job)
        job.peer = None
        if peer.broken:
            self._forget(peer)
        if error is not None:
            self._fail(job, error)
        else:
            self._in_loop(_resolve, job.outcome, job.word)
        self._settle(job)

    def _abandon(self, job: Job) -> None:
        job.abandoned = True  # seen by `_advance` when the transfer has ended

    def _release(self, job: Job) -> None:
        transfer, job.transfer = job.transfer, None
        if transfer is not None:
            with suppress(TransferError):  # of one that failed
                self._agent.release(transfer)

    def _fail(self, job: Job, error: MeshError) -> None:
        # Without the traceback: its frames would keep the agent alive.
        self._in_loop(_reject, job.outcome, type(error)(error.message))

    def _settle(self, job: Job) -> None:
        self._in_loop(_resolve, job.settled, None)

    def _close(self) -> None:
        if self._closing is not None:
            return
        self._closing = self._clock.now() + _CLOSE_SECONDS
        error = TransferError("the transport was closed")
        for job in self._pulling:
            job.abandoned = True
            self._fail(job, error)

    def _shut(self) -> None:
        """End the agent: what still reads is cut off."""
        self._close()
        jobs, self._pulling = self._pulling, []
        for job in jobs:
            self._release(job)
            job.peer = None
        for peer in list(self._peers.values()):
            self._forget(peer)
        try:
            self._agent.close()
        except TransferError as error:
            log.warning("%s", error)
        for job in jobs:
            self._settle(job)

    def _end(self) -> None:
        self._ended.set()
        self._drain()


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: MeshError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen, even if nobody waits any more
