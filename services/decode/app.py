"""What a decode process is made of."""

from kvmesh.host.desk import EngineDesk, Running
from kvmesh.host.process import Process, Service
from kvmesh.host.worker import worker_service
from services.decode.servicer import SERVICE_NAME, DecodeServicer


def app(process: Process, running: Running) -> Service:
    """Return the service around a started engine."""
    servicer = DecodeServicer(EngineDesk(running, process))
    return worker_service(process, running, {SERVICE_NAME: servicer.register})
