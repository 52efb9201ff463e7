"""Every engine's rig for the conformance suite, by the engine's name."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from kvmesh.testing.engine import EngineRig, SimRig
from kvmesh.testing.engine_torch import torch_rig
from kvmesh.testing.engine_vllm import vllm_rig

RigFactory = Callable[[], AbstractAsyncContextManager[EngineRig]]


@asynccontextmanager
async def sim_rig() -> AsyncIterator[EngineRig]:
    """Yield the simulated engine's rig."""
    yield SimRig()


RIGS: Mapping[str, RigFactory] = {"sim": sim_rig, "torch": torch_rig, "vllm": vllm_rig}
"""How to get each engine's rig."""

SLOW = frozenset({"vllm"})
"""Those that need the real model, and minutes."""
