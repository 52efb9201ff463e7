"""The vLLM engine's part in the engine conformance suite: SmolLM2 on the CPU, or a GPU."""

import asyncio
import itertools
import random
import uuid
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvmesh.clock import SystemClock
from kvmesh.config import environment
from kvmesh.engine.base import EngineInfo, Seat
from kvmesh.engine.vllm import VllmConfig, VllmEngine
from kvmesh.models import SMOLLM2, default_cache, fetch_smollm2, read_info
from kvmesh.testing.engine import EngineRig, Pair, Started, started
from kvmesh.types import Role

# A test process has run gRPC, NIXL and PyTorch before: what forks it may hang.
CONFIG = VllmConfig(max_model_len=1024, threads=1, kv_lease_seconds=30, fork=False)

_workers = itertools.count()


@asynccontextmanager
async def vllm_rig() -> AsyncIterator[EngineRig]:
    """Yield a rig with one prefill and one decode engine, started one after the other.

    Fetches the model the first time.
    """
    rig = VllmRig(await asyncio.to_thread(smollm2))
    async with (
        started(rig.engine(Role.PREFILL)) as prefill,
        started(rig.engine(Role.DECODE)) as decode,
    ):
        rig.lent = Pair(prefill, decode)
        yield rig


def smollm2() -> Path:
    """Return the small model's folder. Blocks while it is fetched."""
    return fetch_smollm2(default_cache(environment()), lambda stage, done: None)


class QuietVllmEngine(VllmEngine):
    """A vLLM engine in a process where warnings are errors: vLLM and torch warn of themselves."""

    async def start(self) -> EngineInfo:
        """Start with warnings off."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return await super().start()


class VllmRig:
    """Lends the same two engines to every test."""

    lent: Pair

    def __init__(self, model: Path, config: VllmConfig = CONFIG) -> None:
        self._model = model
        self._config = config
        self.eos = read_info(model).eos_token_ids[0]

    def prompt(self, tokens: int, variant: int = 0) -> list[int]:
        """Return seeded random token ids."""
        rng = random.Random(variant)
        return [1000 + variant, *(rng.randrange(100, 40000) for _ in range(tokens - 1))]

    @asynccontextmanager
    async def single(self) -> AsyncIterator[Started]:
        """Lend the decode engine."""
        yield self.lent.decode

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        """Lend both."""
        yield self.lent

    def fresh(self) -> VllmEngine:
        """Return another decode engine."""
        return self.engine(Role.DECODE)

    def broken(self) -> VllmEngine:
        """Return an engine whose weights vLLM can't load."""
        broken = replace(self._config, engine_args='{"load_format": "no-such-format"}')
        return self.engine(Role.DECODE, broken)

    def engine(self, role: Role, config: VllmConfig | None = None) -> VllmEngine:
        """Return an engine with an identity of its own, not started."""
        seat = Seat(f"vllm-{next(_workers)}", uuid.uuid4().hex, role, self._model, SMOLLM2)
        return QuietVllmEngine(config or self._config, seat, SystemClock())
