"""What a decode process is made of."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmesh.host.process import Process, Service
from kvmesh.host.worker import running_engine, worker_service
from services.decode.config import DecodeConfig
from services.decode.servicer import SERVICE_NAME, DecodeServicer


@asynccontextmanager
async def app(config: DecodeConfig, process: Process) -> AsyncIterator[Service]:
    """Yield the service once the engine is ready."""
    async with running_engine(config, process) as (engine, info):
        servicer = DecodeServicer(
            engine,
            info,
            identity=process.identity,
            gate=process.gate,
            clock=process.clock,
            tracer=process.telemetry.tracer,
        )
        yield worker_service(engine, info, process, {SERVICE_NAME: servicer.register})
