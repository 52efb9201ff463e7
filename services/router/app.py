"""The router, put together: the one place that builds its parts."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from kvmesh.discovery import ROUTING_SETTINGS, FileText, SharedText
from kvmesh.host.process import Process, Service
from kvmesh.host.roster import roster
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.workers import watch_worker
from kvmesh.types import Worker, WorkerNews
from services.router.admission import Admission
from services.router.config import RouterConfig
from services.router.decisions import DecisionLog
from services.router.dispatcher import Dispatcher
from services.router.live import Live, following
from services.router.metrics import RouterMetrics
from services.router.planner import Planner
from services.router.plugins import Policies
from services.router.quarantine import Quarantine
from services.router.reservations import Ledger
from services.router.servicer import SERVICE_NAME, RouterServicer, registration
from services.router.state import Fleet
from services.router.tuning import Tunable
from services.router.watcher import Watch, Watchers


@asynccontextmanager
async def app(config: RouterConfig, process: Process) -> AsyncIterator[Service]:
    """Yield the router once the registry and the workers in it have answered.

    Before, no model would be known, and then nothing of what is cached.
    """
    ledger = Ledger()
    fleet = Fleet(ledger, quarantine=Quarantine(config.routing.quarantine, process.clock))
    policies = Policies(config.routing.policy, config.routing.policy_by_model)
    planner = Planner(fleet, ledger, config.routing, policies, process.rng)
    admission = Admission(fleet, planner, config.queue)
    watch = watch_over(config.rpc, process.id)
    async with (
        Dispatcher(fleet, ledger, admission, process.clock) as dispatcher,
        Watchers(dispatcher, watch, config.watch, process.rng) as watchers,
        roster(process.discovery) as members,
    ):

        def apply(settings: Tunable, policies: Policies) -> None:
            planner.configure(settings.routing, policies)
            admission.configure(settings.queue)
            dispatcher.settings_changed()

        members.listen(watchers.update_members)
        await members.first()
        await watchers.warm()
        decisions = DecisionLog(config.decisions, fleet.knows_model, process.clock)
        metrics = RouterMetrics(process.telemetry.meter, fleet, ledger, admission, dispatcher.audit)
        metrics.show_decisions(decisions)
        servicer = RouterServicer(dispatcher, decisions, metrics, process)
        live = Live(Tunable(config.routing, config.queue), apply, process.telemetry.meter)
        async with following(live, _changed_settings(config, process), process.rng):
            yield Service({SERVICE_NAME: registration(servicer)})


def _changed_settings(config: RouterConfig, process: Process) -> SharedText:
    """Return the document of settings that change while this process runs."""
    if config.tuning.file:
        return FileText(Path(config.tuning.file))
    return process.discovery.shared(ROUTING_SETTINGS)


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
