"""Each listed worker's event stream is followed; one that breaks makes it a suspect."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import UnavailableError
from kvmesh.types import BlocksStored, Member, Role, State, Worker, WorkerEvent, WorkerNews
from services.router.admission import Admission, QueueConfig
from services.router.dispatcher import Dispatcher
from services.router.planner import Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.reservations import Ledger, Life
from services.router.state import Applied, Fleet
from services.router.watcher import WatchConfig, Watchers

FAST = WatchConfig(silence_seconds=30, retry_min_seconds=0.001, retry_max_seconds=0.002)


def member(name: str = "d0", epoch: str = "e1", state: State = State.READY) -> Member:
    return Member(name, Role.DECODE, epoch, f"{name}:1", state, "m", block_size=16)


class Workers:
    """Scripted workers: each opened stream is a queue of news, errors and ends (None)."""

    def __init__(self) -> None:
        self.opened: dict[str, int] = defaultdict(int)
        self.closed: dict[str, int] = defaultdict(int)
        self.streams: dict[str, asyncio.Queue[WorkerNews | Exception | None]] = {}
        self.changed = asyncio.Condition()

    async def watch(self, worker: Worker) -> AsyncGenerator[WorkerNews, None]:
        self.opened[worker.id] += 1
        queue = self.streams[worker.id] = asyncio.Queue()
        await self.note()
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed[worker.id] += 1

    async def note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until_opened(self, name: str, times: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.opened[name] >= times)

    def send(self, sequence: int, *events: WorkerEvent, epoch: str = "e1") -> None:
        self.streams["d0"].put_nowait(WorkerNews("d0", epoch, sequence, events))

    def end(self, how: Exception | None) -> None:
        self.streams["d0"].put_nowait(how)


class Watched(Dispatcher):
    """Notes what the watchers did, for tests to wait for."""

    def __init__(self, fleet: Fleet, ledger: Ledger, workers: Workers) -> None:
        routing = RoutingConfig()
        planner = Planner(fleet, ledger, routing, Policies("least_loaded"), random.Random(1))
        super().__init__(fleet, ledger, Admission(fleet, planner, QueueConfig()), SystemClock())
        self.fleet = fleet
        self.suspected = 0
        self._news = asyncio.Event()

    def apply(self, life: Life, news: WorkerNews) -> Applied:
        applied = super().apply(life, news)
        self._news.set()
        return applied

    def suspect(self, life: Life) -> None:
        super().suspect(life)
        self.suspected += 1
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def routable(self) -> bool:
        return bool(self.fleet.routable("m", Role.DECODE))

    def cached(self) -> set[int]:
        return self.fleet.workers()[0].cached


@asynccontextmanager
async def watching(
    config: WatchConfig = FAST,
) -> AsyncIterator[tuple[Workers, Watched, Watchers]]:
    workers, ledger = Workers(), Ledger()
    async with Watched(Fleet(ledger), ledger, workers) as dispatcher:
        watchers = Watchers(dispatcher, workers.watch, config, random.Random(1))
        async with watchers:
            watchers.update_members((member(),))
            await workers.until_opened("d0", 1)
            yield workers, dispatcher, watchers
        assert workers.opened == workers.closed


async def test_a_worker_is_routable_once_it_has_spoken() -> None:
    async with watching() as (workers, dispatcher, _):
        assert not dispatcher.routable()
        workers.send(1)
        await dispatcher.until(dispatcher.routable)


@pytest.mark.parametrize("how", [None, UnavailableError("gone"), RuntimeError("a bug")])
async def test_a_broken_stream_takes_the_worker_out_at_once_and_a_new_one_brings_it_back(
    how: Exception | None,
) -> None:
    async with watching() as (workers, dispatcher, _):
        workers.send(1, BlocksStored((1,)))
        await dispatcher.until(dispatcher.routable)

        workers.end(how)
        await dispatcher.until(lambda: dispatcher.suspected == 1)
        assert not dispatcher.routable()

        await workers.until_opened("d0", 2)
        assert not dispatcher.routable()
        workers.send(1, BlocksStored((2,)))
        await dispatcher.until(dispatcher.routable)
        assert dispatcher.cached() == {2}


Event = Callable[[Workers, Watchers], None]


def told(workers: Workers, _: Watchers) -> None:
    workers.send(1)


def failed(workers: Workers, _: Watchers) -> None:
    workers.end(UnavailableError("gone"))


def forgotten(_: Workers, watchers: Watchers) -> None:
    watchers.update_members(())


@pytest.mark.parametrize("event", [told, failed, forgotten])
async def test_all_is_known_once_every_worker_has_told_or_cannot(event: Event) -> None:
    patient = replace(FAST, warm_seconds=60)
    async with watching(patient) as (workers, _, watchers):
        watchers.update_members((member(), member("d1")))
        await workers.until_opened("d1", 1)
        warm = asyncio.create_task(watchers.warm())
        workers.streams["d1"].put_nowait(WorkerNews("d1", "e1", 1, ()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not warm.done()
        event(workers, watchers)
        await warm


async def test_the_start_does_not_wait_for_good_for_one_that_is_silent() -> None:
    async with watching(replace(FAST, warm_seconds=0.01)) as (_, dispatcher, watchers):
        await watchers.warm()
        assert not dispatcher.routable()


async def test_nobody_is_waited_for_where_nobody_is() -> None:
    async with watching(replace(FAST, warm_seconds=60)) as (_, _, watchers):
        watchers.update_members(())
        await watchers.warm()


async def test_a_silent_worker_is_a_suspect() -> None:
    config = WatchConfig(silence_seconds=0.02, retry_min_seconds=0.001, retry_max_seconds=0.002)
    async with watching(config) as (workers, dispatcher, _):
        workers.send(1)
        await dispatcher.until(lambda: dispatcher.suspected > 0)
        await workers.until_opened("d0", 2)


async def test_a_gap_leads_to_a_fresh_snapshot_without_taking_the_worker_out() -> None:
    async with watching() as (workers, dispatcher, _):
        workers.send(1, BlocksStored((1,)))
        workers.send(3, BlocksStored((3,)))
        await workers.until_opened("d0", 2)

        assert dispatcher.routable()
        assert dispatcher.suspected == 0
        workers.send(1, BlocksStored((1, 2, 3)))
        await dispatcher.until(lambda: dispatcher.cached() == {1, 2, 3})


async def test_another_life_at_the_same_address_is_not_routed_to() -> None:
    async with watching() as (workers, dispatcher, _):
        workers.send(1, epoch="e2")
        await workers.until_opened("d0", 2)

        assert not dispatcher.routable()


async def test_a_restarted_worker_is_watched_as_its_new_life() -> None:
    async with watching() as (workers, dispatcher, watchers):
        workers.send(1, BlocksStored((1,)))
        await dispatcher.until(dispatcher.routable)

        watchers.update_members((member(epoch="e2"),))
        assert not dispatcher.routable()
        await workers.until_opened("d0", 2)
        workers.send(1, epoch="e2")
        await dispatcher.until(dispatcher.routable)
        assert dispatcher.cached() == set()
        assert workers.closed["d0"] == 1


@pytest.mark.parametrize("members", [(), (member(state=State.DRAINING),)])
async def test_a_worker_that_leaves_is_watched_no_more(members: tuple[Member, ...]) -> None:
    async with watching() as (workers, dispatcher, watchers):
        workers.send(1)
        await dispatcher.until(dispatcher.routable)

        watchers.update_members(members)
        await dispatcher.until(lambda: dispatcher.suspected == 1)

        assert workers.closed["d0"] == 1
        assert not dispatcher.routable()
        watchers.update_members((member(),))
        await workers.until_opened("d0", 2)
        assert not dispatcher.routable()


async def test_every_worker_has_its_own_stream() -> None:
    async with watching() as (workers, _, watchers):
        watchers.update_members((member(), member("d1"), member("d2")))
        await workers.until_opened("d1", 1)
        await workers.until_opened("d2", 1)

        assert workers.opened == {"d0": 1, "d1": 1, "d2": 1}
