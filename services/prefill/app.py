"""What a prefill process is made of."""

from kvmesh.config import ConfigError
from kvmesh.engine.base import PrefillEngine
from kvmesh.host.desk import EngineDesk, Running
from kvmesh.host.process import Process, Service
from kvmesh.host.worker import worker_service
from services.prefill.servicer import SERVICE_NAME, PrefillServicer


def app(process: Process, running: Running) -> Service:
    """Return the service around a started engine."""
    if not isinstance(running.engine, PrefillEngine):
        raise ConfigError(f"engine.name: {running.info.engine} can't prefill for other workers")
    servicer = PrefillServicer(EngineDesk(running, process), running.engine)
    return worker_service(process, running, {SERVICE_NAME: servicer.register})
