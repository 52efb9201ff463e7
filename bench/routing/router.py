"""One router of the simulated mesh: the service's own parts, put together as it does."""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.routing.virtual import VirtualClock
from bench.routing.worker import SimWorker
from kvmesh.types import Worker, WorkerNews
from services.router.admission import Admission, QueueConfig
from services.router.dispatcher import Dispatcher
from services.router.planner import Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.reservations import Ledger, Life
from services.router.state import Fleet
from services.router.watcher import Watch, WatchConfig, Watchers


@dataclass(frozen=True, slots=True)
class SimRouter:
    """A running router. Nothing of it is simulated but the clock."""

    fleet: Fleet
    ledger: Ledger
    dispatcher: Dispatcher

    @property
    def routable(self) -> int:
        """How many workers it would place requests on."""
        return sum(worker.routable for worker in self.fleet.workers())


@asynccontextmanager
async def open_router(
    workers: Mapping[str, SimWorker],
    routing: RoutingConfig,
    clock: VirtualClock,
    rng: random.Random,
    *,
    learn: bool = True,
) -> AsyncIterator[SimRouter]:
    """Yield a router that watches the workers. It knows them a moment later only.

    Without `learn` it does not find out how quick each is.
    """
    ledger = Ledger()
    fleet = Fleet(ledger) if learn else _Unteachable(ledger)
    policies = Policies(routing.policy, routing.policy_by_model)
    planner = Planner(fleet, ledger, routing, policies, rng)
    admission = Admission(fleet, planner, QueueConfig())
    async with (
        Dispatcher(fleet, ledger, admission, clock) as dispatcher,
        Watchers(dispatcher, _watch(workers, rng), WatchConfig(), rng) as watchers,
    ):
        watchers.update_members(tuple(worker.member() for worker in workers.values()))
        yield SimRouter(fleet, ledger, dispatcher)


def _watch(workers: Mapping[str, SimWorker], rng: random.Random) -> Watch:
    def watch(worker: Worker) -> AsyncGenerator[WorkerNews, None]:
        return workers[worker.id].publisher.stream(rng)

    return watch


class _Unteachable(Fleet):
    """A fleet that takes all workers for equally quick."""

    def computed(self, life: Life, tokens: float, seconds: float) -> None:
        """Learn nothing."""
