"""The frontend, put together: the one place that builds its parts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmesh.host.process import Process, Service
from kvmesh.host.roster import roster
from kvmesh.rpc.config import reachable
from kvmesh.rpc.peer import PeerPool
from services.frontend.config import FrontendConfig
from services.frontend.fleet import Fleet
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline import Pipeline
from services.frontend.rest.app import RestApp
from services.frontend.rest.server import serve_http
from services.frontend.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.tickets import Tickets


@asynccontextmanager
async def app(config: FrontendConfig, process: Process) -> AsyncIterator[Service]:
    """Yield the frontend once it listens for HTTP and the registry has answered.

    Leave it when no request runs any more: what still does is cut off.
    """
    telemetry = process.telemetry
    async with PeerPool.open(f"{process.id}/{process.epoch}", config.rpc) as pool:
        fleet = Fleet(pool, process.rng)
        metrics = FrontendMetrics(telemetry.meter, fleet.knows)
        async with roster(process.discovery) as members, Tickets(fleet, metrics) as tickets:
            members.listen(fleet.update)
            await members.first()
            pipeline = Pipeline(
                fleet,
                tickets,
                metrics,
                config.limits,
                tracer=telemetry.tracer,
                clock=process.clock,
            )
            rest = RestApp(pipeline, fleet, metrics, process, config)
            async with serve_http(rest, config.http) as port:
                servicer = InferenceServicer(pipeline, fleet, metrics, process, config)
                address = f"{reachable(config.http.host, config.rpc.advertise)}:{port}"
                yield Service({SERVICE_NAME: servicer.register}, {"http_address": address})
