"""vLLM as an engine of the mesh, on GPUs and on CPUs. Importing this imports no vLLM."""

from kvmesh.clock import Clock
from kvmesh.engine.base import Seat
from kvmesh.engine.vllm.engine import VllmEngine
from kvmesh.engine.vllm.settings import VllmConfig

__all__ = ["Seat", "VllmConfig", "VllmEngine", "create"]


def create(config: VllmConfig, seat: Seat, clock: Clock) -> VllmEngine:
    """Return an engine that has not started yet."""
    return VllmEngine(config, seat, clock)
