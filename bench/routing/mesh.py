"""The simulated mesh: clients, routers and workers, and the way of each request through them."""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bench.routing.feed import Wire
from bench.routing.gaps import Durations
from bench.routing.request import BLOCK, Conversation, Job, Request, Ticket
from bench.routing.router import SimRouter, open_router
from bench.routing.virtual import VirtualClock, run
from bench.routing.worker import MODEL, SimWorker, WorkerConfig
from kvmesh.engine.sequence import Kind
from kvmesh.errors import MeshError
from kvmesh.types import Role
from services.router.dispatcher import Dispatcher, Routed
from services.router.planner import Decision, RoutingConfig
from services.router.policy import Demand

HOP = 0.001
"""Seconds of a message between client, router and worker."""

_LOOK = 0.05


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """A mesh of `decode` and `prefill` workers behind so many routers.

    `worker` is what all can do; `slower` makes every other worker take so many times longer,
    and without `learn` the routers don't find that out. `concurrency` above 0 is a closed
    loop of so many clients. Requests go to each router in turn. Equal seeds give equal runs.
    `timed` measures the decisions, which takes some time itself.
    """

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    decode: int = 8
    prefill: int = 0
    routers: int = 1
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    wire: Wire = field(default_factory=Wire)
    slower: float = 1.0
    concurrency: int = 0
    learn: bool = True
    seed: int = 1
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a workload. `decision_seconds` are CPU time of the real router's code,
    where it was measured.

    `busy_seconds` is how long each worker computed, by role. `left_over` counts reservations
    and KV blocks that somebody still holds, `streams` the event streams that were opened.
    """

    requests: Sequence[Request]
    seconds: float
    gaps: Durations
    busy_seconds: Mapping[Role, Sequence[float]]
    decision_seconds: Sequence[float]
    left_over: int
    streams: int


def simulate(config: MeshConfig, conversations: Sequence[Conversation]) -> Run:
    """Run a workload to its end. The requests are changed: they tell what became of them."""
    return run(partial(_simulate, config, conversations))


async def _simulate(config: MeshConfig, conversations: Sequence[Conversation]) -> Run:
    mesh = _Mesh(config)
    async with AsyncExitStack() as stack:
        await mesh.open(stack)
        return await mesh.serve(conversations)


class _Mesh:
    """One mesh, for one workload."""

    def __init__(self, config: MeshConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._gaps = Durations()
        self._took: list[float] = []
        self._workers: dict[str, SimWorker] = {}
        self._routers: list[SimRouter] = []
        self._turn = 0
        self._flights: dict[Request, _Flight] = {}
        self._next: Iterator[Conversation] = iter(())
        self._left = 0
        self._all_over: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(self._failed)
        for number in range(config.decode):
            self._add(f"d{number:04}", Role.DECODE, number)
        for number in range(config.prefill):
            self._add(f"p{number:04}", Role.PREFILL, number)

    async def open(self, stack: AsyncExitStack) -> None:
        """Start the routers, and wait until each knows all workers."""
        config, clock = self._config, VirtualClock(self._loop)
        for number in range(config.routers):
            rng = random.Random(f"router {number} {config.seed}")
            opening = open_router(self._workers, config.routing, clock, rng, learn=config.learn)
            self._routers.append(await stack.enter_async_context(opening))
        count = len(self._workers)
        while any(router.routable < count for router in self._routers):  # noqa: ASYNC110 - no event
            await asyncio.sleep(_LOOK)

    async def serve(self, conversations: Sequence[Conversation]) -> Run:
        """Have all conversations, and return what came of them once all is quiet again."""
        begin = self._loop.time()
        self._left = len(conversations)
        if self._config.concurrency:
            self._next = iter(conversations)
            for _ in range(self._config.concurrency):
                self._begin_next()
        else:
            for conversation in conversations:
                self._loop.call_at(begin + conversation.start, self._send, conversation, 0)
        await self._all_over
        seconds = self._loop.time() - begin
        await asyncio.sleep(_LOOK)  # for the last tickets
        return Run(
            [request for conversation in conversations for request in conversation.turns],
            seconds,
            self._gaps,
            {role: self._busy(role) for role in (Role.PREFILL, Role.DECODE)},
            self._took,
            sum(router.ledger.active for router in self._routers)
            + sum(worker.held_blocks for worker in self._workers.values()),
            sum(worker.publisher.streams for worker in self._workers.values()),
        )

    def _failed(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        """End at once when a callback has failed."""
        error = what.get("exception")
        if isinstance(error, Exception) and not self._all_over.done():
            self._all_over.set_exception(error)
        else:
            loop.default_exception_handler(what)

    def _add(self, name: str, role: Role, number: int) -> None:
        config = self._config.worker
        if number % 2 == 0 and self._config.slower != 1:
            speed = config.latency.speed / self._config.slower
            config = replace(config, latency=replace(config.latency, speed=speed))
        worker = SimWorker(name, role, config, self._config.wire, self._gaps)
        worker.on_first = self._on_first
        worker.on_pulled = self._on_pulled
        worker.on_over = self._on_over
        self._workers[name] = worker

    def _busy(self, role: Role) -> list[float]:
        return [w.busy_seconds for w in self._workers.values() if w.role is role]

    def _begin_next(self) -> None:
        conversation = next(self._next, None)
        if conversation is not None:
            self._loop.call_later(HOP, self._send, conversation, 0)

    def _send(self, conversation: Conversation, turn: int) -> None:
        request = conversation.turns[turn]
        request.arrived = self._loop.time()
        router = self._routers[self._turn % len(self._routers)]
        self._turn += 1
        demand = Demand(
            str(self._turn),
            MODEL,
            request.prompt,
            request.completion,
            request.prompt_hashes,
            BLOCK,
            session=request.session,
        )
        flight = _Flight(conversation, turn, router.dispatcher)
        self._flights[request] = flight
        begin = time.thread_time() if self._config.timed else 0.0
        try:
            flight.routed = flight.dispatcher.submit(demand, None, partial(self._answered, request))
        except MeshError as error:
            self._answered(request, error)
        if self._config.timed:
            self._took.append(time.thread_time() - begin)

    def _answered(self, request: Request, answer: Decision | MeshError) -> None:
        if isinstance(answer, MeshError):
            request.refused = True
            self._loop.call_later(HOP, self._over, request)
            return
        plan = answer.plan
        request.decode = plan.decode.id
        if plan.prefill is None:
            worker, kind = self._workers[request.decode], Kind.GENERATE
        else:
            request.prefill = plan.prefill.id
            worker, kind = self._workers[request.prefill], Kind.PREFILL
        self._loop.call_later(HOP, worker.submit, Job(request, kind))

    def _on_first(self, job: Job) -> None:
        self._loop.call_later(HOP, self._first_token, job)

    def _first_token(self, job: Job) -> None:
        request, flight = job.request, self._flights[job.request]
        request.ttft = self._loop.time() + HOP - request.arrived
        if flight.routed is not None:
            flight.dispatcher.prefilled(flight.routed, request.cached)
        if job.ticket is not None:
            resumed = Job(request, Kind.RESUME, job.ticket)
            self._loop.call_later(HOP, self._workers[request.decode].submit, resumed)

    def _on_pulled(self, ticket: Ticket) -> None:
        self._loop.call_later(HOP, self._workers[ticket.holder].release, ticket)

    def _on_over(self, job: Job) -> None:
        self._loop.call_later(HOP, self._over, job.request)

    def _over(self, request: Request) -> None:
        flight = self._flights.pop(request)
        if flight.routed is not None:
            flight.dispatcher.end(flight.routed)
        turns, turn = flight.conversation.turns, flight.turn + 1
        if turn < len(turns):
            self._loop.call_later(turns[turn].pause, self._send, flight.conversation, turn)
            return
        self._left -= 1
        if not self._left:
            self._all_over.set_result(None)
        elif self._config.concurrency:
            self._begin_next()


@dataclass(slots=True)
class _Flight:
    """A request on its way."""

    conversation: Conversation
    turn: int
    dispatcher: Dispatcher
    routed: Routed | None = None
