"""What a prefill process is made of."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmesh.config import ConfigError
from kvmesh.engine.base import PrefillEngine
from kvmesh.host.process import Process, Service
from kvmesh.host.worker import running_engine, worker_service
from services.prefill.config import PrefillConfig
from services.prefill.servicer import SERVICE_NAME, PrefillServicer


@asynccontextmanager
async def app(config: PrefillConfig, process: Process) -> AsyncIterator[Service]:
    """Yield the service once the engine is ready."""
    async with running_engine(config, process) as (engine, info):
        if not isinstance(engine, PrefillEngine):
            raise ConfigError(f"engine.name: {info.engine} can't prefill for other workers")
        servicer = PrefillServicer(
            engine,
            info,
            identity=process.identity,
            gate=process.gate,
            clock=process.clock,
            tracer=process.telemetry.tracer,
        )
        yield worker_service(engine, info, process, {SERVICE_NAME: servicer.register})
