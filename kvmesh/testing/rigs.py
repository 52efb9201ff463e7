"""Every engine's rig for the conformance suite, by the engine's name."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.testing.engine import EngineRig, SimRig
from kvmesh.testing.engine_torch import torch_rig
from kvmesh.testing.engine_vllm import vllm_rig

RigFactory = Callable[[], AbstractAsyncContextManager[EngineRig]]


@asynccontextmanager
async def sim_rig() -> AsyncIterator[EngineRig]:
    """Yield the simulated engine's rig."""
    yield SimRig()


@asynccontextmanager
async def sim_nixl_rig() -> AsyncIterator[EngineRig]:
    """Yield the simulated engine's rig, with KV moved by NIXL."""
    yield SimRig(SimConfig(block_size=4, latency=Latency(speed=0.0), kv_transport="nixl"))


RIGS: Mapping[str, RigFactory] = {
    "sim": sim_rig,
    "sim-nixl": sim_nixl_rig,
    "torch": torch_rig,
    "vllm": vllm_rig,
}
"""How to get each engine's rig."""

SLOW = frozenset({"vllm"})
"""Those that need the real model, and minutes."""

STEPPING = frozenset(RIGS) - {"vllm"}
"""Those that can hand over whole steps."""

CONCURRENT = frozenset(RIGS) - {"vllm"}
"""Those whose decode can begin beside prefill."""
