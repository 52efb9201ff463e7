"""The thread that owns a NIXL agent: reads blocks, asks and answers, and sleeps in between.

NIXL moves nothing by itself: what peers want of this process, and what they tell it, waits
until somebody calls. So the thread calls every 0.1 ms while something is going on and ever
more rarely, down to once in 40 ms, when nothing is.
"""

import asyncio
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import Clock
from kvmesh.errors import MeshError, TicketError, TransferError
from kvmesh.kv.nixl_agent import Agent, Indices, Read
from kvmesh.kv.nixl_messages import PING, Answer, Ask, Region, Site, parse_message

log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 25  # one read: about 5 ms on one host, in which nobody is answered
_READING_SECONDS = 0.0002  # between two looks at reads that run by themselves
_BUSY_SECONDS = 0.0001
_IDLE_SECONDS = 0.04
_IDLE_SHARE = 0.02  # of the time since something went on: 2 s until it is idle
_PING_SECONDS = 0.1  # how soon a holder's death is seen while it should answer
_CLOSE_SECONDS = 1.0  # for reads under way: to cut one off can upset its holder
_MAX_PEERS = 256  # known at a time; the longest unused is forgotten first


@dataclass(slots=True)
class _Peer:
    """A known agent; `blocks` are its prepared descriptors once something was pulled."""

    name: str
    blocks: Any = None
    broken: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """One pull. Both futures are of the event loop, where the thread sets them.

    `outcome` is whether the holder held the ticket, `settled` that nothing is written any
    more. `stuck` is set by the loop when it waits no longer for a read that doesn't end.
    """

    site: Site
    remote: Indices
    local: Indices
    ticket_id: str
    outcome: asyncio.Future[bool]
    settled: asyncio.Future[None]
    stuck: bool = False
    abandoned: bool = False
    at: int = 0
    read: Read | None = field(default=None, repr=False)
    peer: _Peer | None = field(default=None, repr=False)


OnAsked = Callable[[Sequence[tuple[str, Ask]]], None]
"""Gets what peers ask, each with the asker's name, in the event loop."""


class AgentThread:
    """Runs jobs until closed. Made in a running event loop, and used from it alone."""

    def __init__(self, name: str, region: Region, clock: Clock, on_asked: OnAsked) -> None:
        """Start the agent, which takes up to half a second. Raises `TransferError`."""
        self._name = name
        self._region = region
        self._clock = clock
        self._on_asked = on_asked
        self._loop = asyncio.get_running_loop()
        # Bounded by the pulls in flight and by what peers ask: at most two for each.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._closing: float | None = None
        self._active = clock.now()
        self._pinged = clock.now()
        self._count = 0
        self._piece = max(1, _PIECE_BYTES // region.layout.block_bytes)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._reading: list[Job] = []
        self._asked: dict[int, Job] = {}
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

    def answer(self, answers: Sequence[tuple[str, Ask, bool]]) -> None:
        """Answer what was asked, each by the asker's name."""
        self._post(lambda: self._answer(answers))

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
            agent = self._agent = Agent(self._name, self._region)
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
        while self._closing is None or (self._reading and self._clock.now() < self._closing):
            with suppress(queue.Empty):
                self._commands.get(timeout=self._pause())()
                self._active = self._clock.now()
                while True:
                    self._commands.get_nowait()()
            self._listen()
            for job in tuple(self._reading):
                self._advance(job)
            self._ping()

    def _pause(self) -> float:
        moving = [job for job in self._reading if not job.stuck]
        if moving:
            waiting = all(job.read is not None and not job.read.done for job in moving)
            return _READING_SECONDS if waiting else 0.0
        idle = self._clock.now() - self._active
        return min(max(idle * _IDLE_SHARE, _BUSY_SECONDS), _IDLE_SECONDS)

    def _listen(self) -> None:
        asks = []
        for sender, message in self._agent.receive():
            self._active = self._clock.now()
            said = parse_message(message)
            if isinstance(said, Ask) and f"kvmesh-{said.holder}" == self._name:
                asks.append((sender, said))
            elif isinstance(said, Answer):
                self._take(sender, said)
        if asks:
            self._in_loop(self._on_asked, asks)

    def _take(self, sender: str, answer: Answer) -> None:
        job = self._asked.get(answer.number)
        if job is not None and job.peer is not None and job.peer.name == sender:
            del self._asked[answer.number]
            self._let_go(job)
            self._in_loop(_resolve, job.outcome, answer.held)

    def _start(self, job: Job) -> None:
        try:
            if self._closing is not None:
                raise TransferError("the transport was closed")
            job.peer = self._source(job.site)
            self._agent.send(job.peer.name, PING)  # so that it is attentive when asked
        except MeshError as error:
            if job.peer is not None:
                self._break(job.peer, [job], error)
            else:
                self._fail(job, error)
                self._settle(job)
        else:
            self._reading.append(job)

    def _source(self, site: Site) -> _Peer:
        """Return the peer with its blocks ready to be read."""
        peer = self._meet(f"kvmesh-{site.epoch}", site.metadata)
        if any(job.stuck and job.peer is peer for job in self._reading):
            raise TransferError("the holder has not answered an earlier pull yet")
        if peer.blocks is None:
            peer.blocks = self._agent.prepare(peer.name, site.region)
        return peer

    def _meet(self, name: str, metadata: bytes) -> _Peer:
        """Return a peer, known or new."""
        peer = self._peers.get(name)
        if peer is None:
            if name != self._name and self._agent.add(metadata) != name:
                raise TicketError("the ticket names another holder than its metadata")
            peer = self._peers[name] = _Peer(name)
            for other in list(self._peers.values())[:-_MAX_PEERS]:
                self._forget(other)
        if peer.broken:
            raise TransferError("the holder is gone")
        self._peers.move_to_end(name)
        return peer

    def _forget(self, peer: _Peer) -> None:
        """Drop a peer, now or when no job uses it any more."""
        jobs = (*self._reading, *self._asked.values())
        if any(job.peer is peer for job in jobs) or self._peers.get(peer.name) is not peer:
            return
        del self._peers[peer.name]
        blocks, peer.blocks = peer.blocks, None
        with suppress(TransferError):  # it is gone already: then there is nothing to undo
            if blocks is not None:
                self._agent.forget(blocks)
            if peer.name != self._name:
                self._agent.remove(peer.name)

    def _advance(self, job: Job) -> None:
        """Go on with a job that reads: look, read the next piece, or ask."""
        assert job.peer is not None
        try:
            if job.read is not None and not self._agent.check(job.read):
                return
            self._release(job)
            if job.abandoned or job.at >= len(job.local):
                self._reading.remove(job)
                self._settle(job)
                if job.abandoned:
                    self._let_go(job)
                else:
                    self._ask(job, job.peer)
                return
            stop = job.at + self._piece
            job.read = self._agent.read(
                job.peer.blocks, job.remote[job.at : stop], job.local[job.at : stop]
            )
            job.at = stop
        except TransferError as error:
            self._break(job.peer, [job], error)

    def _ask(self, job: Job, peer: _Peer) -> None:
        self._count += 1
        self._asked[self._count] = job
        ask = Ask(self._count, job.site.epoch, job.ticket_id, self._agent.metadata)
        self._agent.send(peer.name, ask.pack())
        self._active = self._clock.now()

    def _ping(self) -> None:
        """Send something to those that owe an answer: that fails where one has died."""
        now = self._clock.now()
        if not self._asked or now < self._pinged + _PING_SECONDS:
            return
        self._pinged = now
        owing: dict[str, list[Job]] = {}
        for job in self._asked.values():
            assert job.peer is not None
            owing.setdefault(job.peer.name, []).append(job)
        for name, jobs in owing.items():
            try:
                self._agent.send(name, PING)
            except TransferError as error:
                self._break(self._peers[name], jobs, error)

    def _break(self, peer: _Peer, jobs: Sequence[Job], error: MeshError) -> None:
        """Fail jobs because their peer has failed. Its other jobs will see it themselves."""
        peer.broken = True
        for job in jobs:
            self._release(job)
            self._unask(job)
            if job in self._reading:
                self._reading.remove(job)
            job.peer = None
        self._forget(peer)
        for job in jobs:
            self._fail(job, error)
            self._settle(job)

    def _abandon(self, job: Job) -> None:
        job.abandoned = True  # one that reads is seen to by `_advance`
        if self._unask(job):
            self._let_go(job)

    def _unask(self, job: Job) -> bool:
        """Wait for no answer any more; False if none was waited for."""
        numbers = [number for number, each in self._asked.items() if each is job]
        for number in numbers:
            del self._asked[number]
        return bool(numbers)

    def _answer(self, answers: Sequence[tuple[str, Ask, bool]]) -> None:
        if self._closing is not None:
            return
        for name, ask, held in answers:
            try:
                peer = self._meet(name, ask.metadata)
            except MeshError as error:
                log.debug("cannot answer %s: %s", name, error)
                continue
            try:
                self._agent.send(name, Answer(ask.number, held).pack())
            except TransferError as error:
                log.debug("cannot answer %s: %s", name, error)
                peer.broken = True
                self._forget(peer)

    def _let_go(self, job: Job) -> None:
        """End a job's use of its peer."""
        peer, job.peer = job.peer, None
        if peer is not None and peer.broken:
            self._forget(peer)

    def _release(self, job: Job) -> None:
        read, job.read = job.read, None
        if read is not None:
            with suppress(TransferError):  # of a read that failed
                self._agent.release(read)

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
        for job in (*self._reading, *self._asked.values()):
            job.abandoned = True
            self._fail(job, error)

    def _shut(self) -> None:
        """End the agent: what still reads is cut off."""
        self._close()
        jobs, self._reading = self._reading, []
        self._asked.clear()
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
