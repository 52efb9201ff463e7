"""What a decode process is made of."""

from kvmesh.host.process import Process, Service
from kvmesh.host.worker import Running, worker_service
from services.decode.servicer import SERVICE_NAME, DecodeServicer


def app(process: Process, running: Running) -> Service:
    """Return the service around a started engine."""
    servicer = DecodeServicer(
        running.engine,
        running.info,
        identity=process.identity,
        gate=process.gate,
        clock=process.clock,
        tracer=process.telemetry.tracer,
    )
    return worker_service(process, running, {SERVICE_NAME: servicer.register})
