"""What the engine conformance suite needs from an engine, and the simulated engine's part.

An engine joins the suite with an `EngineRig` in `RIGS`: nothing else names engines there.
"""

import itertools
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from kvmesh.clock import Clock, SystemClock
from kvmesh.engine.base import AsyncEngine, EngineInfo
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.engine.sim.faults import Faults
from kvmesh.engine.sim.latency import Latency


@dataclass(frozen=True, slots=True)
class Started:
    """A started engine, and what it said of itself."""

    engine: AsyncEngine
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Pair:
    """Two started engines of one model, in two lives: KV goes from `prefill` to `decode`."""

    prefill: Started
    decode: Started


class EngineRig(Protocol):
    """Makes one kind of engine for the suite.

    Used as a context manager for all tests of a module, in one event loop. What `single`
    and `pair` lend may be shared by tests, if it is idle and whole in between.
    """

    @property
    def eos(self) -> int:
        """A token that ends the model's text."""
        ...

    def prompt(self, tokens: int, variant: int = 0) -> list[int]:
        """Return a valid prompt of that many tokens; variants differ in their first token."""
        ...

    def single(self) -> AbstractAsyncContextManager[Started]:
        """Lend an engine that can generate."""
        ...

    def pair(self) -> AbstractAsyncContextManager[Pair]:
        """Lend two engines with a hand-off between them."""
        ...

    def fresh(self) -> AsyncEngine:
        """Return an engine that is not started; the test closes it."""
        ...

    def broken(self) -> AsyncEngine:
        """Return an engine whose start raises `EngineError`; the test closes it."""
        ...


class SimRig:
    """The simulated engine at full speed, with small blocks."""

    def __init__(self, config: SimConfig | None = None) -> None:
        self._config = config or SimConfig(block_size=4, latency=Latency(speed=0.0))

    @property
    def eos(self) -> int:
        """The model's end."""
        return self._config.eos_token_id

    def prompt(self, tokens: int, variant: int = 0) -> list[int]:
        """Return seeded random token ids."""
        rng = random.Random(variant)
        return [
            1000 + variant,
            *(rng.randrange(self._config.vocab_size) for _ in range(tokens - 1)),
        ]

    @asynccontextmanager
    async def single(self) -> AsyncIterator[Started]:
        """Lend a new engine."""
        async with started(self.fresh()) as engine:
            yield engine

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        """Lend two new engines."""
        async with started(self.fresh()) as prefill, started(self.fresh()) as decode:
            yield Pair(prefill, decode)

    def fresh(self) -> SimEngine:
        """Return a new engine."""
        return sim_engine(self._config)

    def broken(self) -> SimEngine:
        """Return an engine that is told to fail."""
        return sim_engine(SimConfig(faults=Faults(fail_start=True)))


_workers = itertools.count()


def sim_engine(
    config: SimConfig, *, clock: Clock | None = None, model: str = "sim-model", epoch: str = ""
) -> SimEngine:
    """Return a simulated engine with an identity of its own, not started."""
    return SimEngine(
        config,
        model=model,
        worker_id=f"sim-{next(_workers)}",
        epoch=epoch or uuid.uuid4().hex,
        clock=clock or SystemClock(),
        rng=random.Random(0),
    )


@asynccontextmanager
async def started(engine: AsyncEngine) -> AsyncIterator[Started]:
    """Start an engine and close it in the end."""
    try:
        yield Started(engine, await engine.start())
    finally:
        await engine.aclose()
