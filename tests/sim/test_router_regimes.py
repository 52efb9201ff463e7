"""Policies on simulated workers in virtual time: how much they hit, how long they take.

The router's own planner, fleet and ledger place requests on workers that have the sim
engine's latency and block pool, and that report as real ones do. Nothing waits.
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from kvmesh.engine.sim.latency import Latency
from kvmesh.kv.pool import BlockPool
from kvmesh.types import CacheSnapshot, KvEvent, Load, Member, Role, State, WorkerNews
from services.router.planner import Decision, Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policy import Demand
from services.router.reservations import Ledger, Life
from services.router.state import Applied, Fleet

BLOCK = 64
PREFIXES, PREFIX_TOKENS, REUSE = 64, 1500, 20
TEMPLATE, UNIQUE, COMPLETION = 30, 50, 16
BATCH_TOKENS = 8192
EVENTS_AFTER, LOAD_EVERY = 0.02, 0.1
HOP = 0.001


class Time:
    """Virtual time: calls what is due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), call))

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.now, _, call = heapq.heappop(self._due)
            call()


@dataclass(eq=False)
class Request:
    """One request, and what became of it."""

    hashes: Sequence[int]
    prompt: int
    arrived: float = 0.0
    decision: Decision | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    tokens: int = 0
    ttft: float = 0.0


class SimWorker:
    """A worker with the sim engine's latency: steps that prefill and decode at once."""

    def __init__(self, time: Time, latency: Latency, blocks: int, mesh: "Mesh", name: str) -> None:
        self.life = Life(name, "e1")
        self._time = time
        self._latency = latency
        self._mesh = mesh
        self._pool = BlockPool(blocks, self._changed)
        self._waiting: list[Request] = []
        self._prompts: list[Request] = []
        self._running: list[Request] = []
        self._busy = False
        self._events: list[KvEvent] = []
        self._sequence = 0
        self._report(CacheSnapshot(()))
        time.later(LOAD_EVERY * len(mesh.workers) / 8, self._tick)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        if not self._busy:
            self._step()

    def _step(self) -> None:
        self._admit()
        self._busy = bool(self._prompts or self._running)
        if not self._busy:
            return
        decoded, self._running = self._running, []
        for request in decoded:
            request.tokens += 1
        budget, prefilled = BATCH_TOKENS - len(decoded), 0
        first: list[Request] = []
        for request in self._prompts:
            count = min(budget - prefilled, request.prompt - request.computed)
            request.computed += count
            prefilled += count
            full = request.computed // BLOCK
            request.blocks[:full] = self._pool.publish(request.blocks[:full], request.hashes[:full])
            if request.computed == request.prompt:
                request.tokens = 1
                first.append(request)
        self._prompts = [r for r in self._prompts if r not in first]
        kv = sum(r.prompt + r.tokens for r in decoded)
        seconds = self._latency.step_seconds(prefilled, len(decoded), kv)
        self._time.later(seconds, partial(self._stepped, [*decoded, *first], first))

    def _stepped(self, produced: list[Request], first: list[Request]) -> None:
        for request in first:
            self._time.later(HOP, partial(self._mesh.first_token, request))
        for request in produced:
            if request.tokens >= COMPLETION:
                self._pool.release(request.blocks)
                self._time.later(HOP, partial(self._mesh.over, request))
            else:
                self._running.append(request)
        self._step()

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            usable = (request.prompt - 1) // BLOCK
            count = -(-(request.prompt + COMPLETION) // BLOCK)
            reserved = self._pool.reserve(request.hashes[:usable], count)
            if reserved is None:
                return
            request.blocks = reserved.blocks
            request.computed = request.cached = reserved.hits * BLOCK
            self._prompts.append(self._waiting.pop(0))

    def _changed(self, event: KvEvent) -> None:
        if not self._events:
            self._time.later(EVENTS_AFTER, self._tell)
        self._events.append(event)

    def _tick(self) -> None:
        self._tell()
        self._time.later(LOAD_EVERY, self._tick)

    def _tell(self) -> None:
        events, self._events = self._events, []
        self._report(*events)

    def _report(self, *events: CacheSnapshot | KvEvent) -> None:
        self._sequence += 1
        running = len(self._prompts) + len(self._running)
        pool = self._pool
        load = Load(running, len(self._waiting), pool.used, pool.total_blocks)
        news = WorkerNews(self.life.worker_id, "e1", self._sequence, (*events, load))
        assert self._mesh.fleet.apply(self.life, news) is Applied.OK


class Mesh:
    """Workers behind one router."""

    def __init__(self, policy: str, latencies: Sequence[Latency], blocks: int, seed: int) -> None:
        self.learn = True
        self.time = Time()
        self.ledger = Ledger()
        self.fleet = Fleet(self.ledger)
        names = [f"d{n}" for n in range(len(latencies))]
        self.fleet.update(
            Member(
                id=name,
                role=Role.DECODE,
                epoch="e1",
                address=name,
                state=State.READY,
                model="m",
                block_size=BLOCK,
                total_blocks=blocks,
            )
            for name in names
        )
        self.workers: dict[str, SimWorker] = {}
        for name, latency in zip(names, latencies, strict=True):
            self.workers[name] = SimWorker(self.time, latency, blocks, self, name)
        routing = RoutingConfig(policy=policy)
        rng = random.Random(seed)
        self.planner = Planner(self.fleet, self.ledger, routing, Policies(policy), rng)
        self.ended: list[Request] = []
        self._next: Iterator[Request] = iter(())

    def closed_loop(self, requests: list[Request], concurrency: int) -> "Result":
        self._next = iter(requests)
        for _ in range(concurrency):
            self._time_next()
        return self._result(len(requests))

    def open_loop(self, requests: list[Request], rate: float, rng: random.Random) -> "Result":
        at = 0.0
        for request in requests:
            at += rng.expovariate(rate)
            self.time.later(at, partial(self._arrive, request))
        return self._result(len(requests))

    def first_token(self, request: Request) -> None:
        request.ttft = self.time.now + HOP - request.arrived
        assert request.decision is not None
        work = request.decision.chosen
        self.ledger.prefilled(request.decision.reservation)
        if self.learn:
            life = request.decision.reservation.decode
            self.fleet.computed(life, work.uncached + work.queued, request.ttft - 2 * HOP)

    def over(self, request: Request) -> None:
        assert request.decision is not None
        self.ledger.release(request.decision.reservation)
        self.ended.append(request)
        self._time_next()

    def _time_next(self) -> None:
        request = next(self._next, None)
        if request is not None:
            self.time.later(HOP, partial(self._arrive, request))

    def _arrive(self, request: Request) -> None:
        request.arrived = self.time.now
        demand = Demand("r", "m", request.prompt, COMPLETION, request.hashes, BLOCK)
        decision = self.planner.plan(demand)
        assert isinstance(decision, Decision)
        request.decision = decision
        worker = self.workers[decision.plan.decode.id]
        self.time.later(HOP, partial(worker.submit, request))

    def _result(self, count: int) -> "Result":
        self.time.run_until(lambda: len(self.ended) == count)
        hits = sum(r.cached for r in self.ended) / sum(r.prompt for r in self.ended)
        share = [
            sum(1 for r in self.ended if r.decision and r.decision.plan.decode.id == n)
            for n in self.workers
        ]
        assert self.ledger.active == 0
        return Result(
            hits,
            statistics.mean(r.ttft for r in self.ended),
            statistics.quantiles([r.ttft for r in self.ended], n=100)[-1],
            max(share) * len(share) / count,
            self.time.now,
        )


@dataclass(frozen=True)
class Result:
    """Hit rate, TTFT in seconds, the busiest worker's share over the mean, total seconds."""

    hit_rate: float
    ttft: float
    p99: float
    imbalance: float
    seconds: float


def workload(rng: random.Random) -> list[Request]:
    shared = (TEMPLATE + PREFIX_TOKENS) // BLOCK
    prompt = TEMPLATE + PREFIX_TOKENS + UNIQUE
    requests = []
    for _ in range(PREFIXES):
        prefix = [rng.getrandbits(64) for _ in range(shared)]
        for _ in range(REUSE):
            own = [rng.getrandbits(64) for _ in range(prompt // BLOCK - shared)]
            requests.append(Request(prefix + own, prompt))
    rng.shuffle(requests)
    return requests


@dataclass(frozen=True)
class Case:
    """A load: `rate` 0 is a closed loop. `uneven` makes every other worker slower."""

    blocks: int
    rate: float = 0.0
    slower: float = 1.0
    uneven: float = 1.0
    learn: bool = True


def measure(policy: str, case: Case, seed: int) -> Result:
    rng = random.Random(seed)
    base = 100 * case.slower
    latencies = [Latency(base * (1 if number % 2 else case.uneven)) for number in range(8)]
    mesh = Mesh(policy, latencies, case.blocks, seed)
    mesh.learn = case.learn
    requests = workload(rng)
    if case.rate:
        return mesh.open_loop(requests, case.rate, rng)
    return mesh.closed_loop(requests, 32)


EVERYTHING_FITS, A_THIRD_FITS = 16_384, 512


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rate", [0, 60])
def test_where_everything_fits_prefixes_stay_where_they_are(rate: float, seed: int) -> None:
    case = Case(EVERYTHING_FITS, rate)
    kv, turns = measure("kv", case, seed), measure("round_robin", case, seed)

    assert kv.hit_rate >= 0.80
    assert kv.ttft <= turns.ttft
    assert kv.imbalance < 2


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("rate", "slower", "least"), [(0, 1, 0.9), (60, 1, 0.9), (0, 5, 0.7)])
def test_where_a_third_fits_workers_share_the_prefixes_out(
    rate: float, slower: float, least: float, seed: int
) -> None:
    case = Case(A_THIRD_FITS, rate, slower)
    kv, turns = measure("kv", case, seed), measure("round_robin", case, seed)

    assert kv.hit_rate >= 0.62
    assert kv.ttft <= least * turns.ttft


def test_workers_that_turn_out_slow_are_given_less() -> None:
    case = Case(A_THIRD_FITS, rate=60, uneven=5)
    mean = {
        learn: statistics.mean(
            measure("kv", replace(case, learn=learn), seed).ttft for seed in (1, 2, 3)
        )
        for learn in (True, False)
    }

    assert mean[True] < mean[False]
