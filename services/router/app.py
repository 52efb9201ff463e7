"""The router, put together: the one place that builds its parts."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from kvmesh.host.process import Process, Service
from kvmesh.host.roster import roster
from kvmesh.rpc.clients import watch_worker
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.types import Worker, WorkerNews
from services.router.admission import Admission
from services.router.config import RouterConfig
from services.router.dispatcher import Dispatcher
from services.router.metrics import RouterMetrics
from services.router.planner import Planner
from services.router.plugins import Policies
from services.router.reservations import Ledger
from services.router.servicer import SERVICE_NAME, RouterServicer, registration
from services.router.state import Fleet
from services.router.watcher import Watch, Watchers


@asynccontextmanager
async def app(config: RouterConfig, process: Process) -> AsyncIterator[Service]:
    """Yield the router once the registry has answered: before, no model would be known."""
    ledger = Ledger()
    fleet = Fleet(ledger)
    policies = Policies(config.routing.policy, config.routing.policy_by_model)
    planner = Planner(fleet, ledger, config.routing, policies, process.rng)
    admission = Admission(fleet, planner, config.queue)
    watch = watch_over(config.rpc, process.id)
    async with (
        Dispatcher(fleet, ledger, admission, process.clock) as dispatcher,
        Watchers(dispatcher, watch, config.watch, process.rng) as watchers,
        roster(process.discovery) as members,
    ):
        members.listen(watchers.update_members)
        await members.first()
        metrics = RouterMetrics(process.telemetry.meter, fleet, ledger, admission, dispatcher.audit)
        servicer = RouterServicer(
            dispatcher,
            metrics,
            process.telemetry.tracer,
            identity=process.identity,
            gate=process.gate,
            clock=process.clock,
        )
        yield Service({SERVICE_NAME: registration(servicer)})


def watch_over(config: RpcConfig, client_id: str) -> Watch:
    """Return what opens event streams over gRPC, each on a connection of its own.

    A fresh connection has no back-off left over from the one that broke.
    """

    async def watch(worker: Worker) -> AsyncGenerator[WorkerNews, None]:
        peer = Peer(worker, client_id, config)
        try:
            async with aclosing(watch_worker(peer, client_id)) as stream:
                async for news in stream:
                    yield news
        finally:
            await peer.aclose()

    return watch
