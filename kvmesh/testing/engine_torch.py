"""The torch engine for tests: a tiny Llama with random weights, and the suite's rig for it."""

import asyncio
import itertools
import random
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvmesh.clock import Clock, SystemClock
from kvmesh.engine.base import Seat
from kvmesh.engine.batch_engine import BatchEngine
from kvmesh.engine.torch import TorchConfig, TorchSequence, create
from kvmesh.models import read_info, tiny_folder
from kvmesh.testing.engine import EngineRig, Pair, Started, started
from kvmesh.types import Role

CONTEXT_LENGTH = 1024
CONFIG = TorchConfig(
    block_size=4,
    kv_cache_mb=1,
    workspace_mb=64,
    max_batch_tokens=64,
    threads=1,
    kv_transport="local",
)

_SPREAD = 0.3  # wide enough that no two tokens are nearly equally likely
_workers = itertools.count()


def tiny_llama(path: Path, *, seed: int = 0) -> Path:
    """Make a model folder with a tokenizer and seeded random weights; returns `path`.

    2 layers, 4 heads, 2 KV heads, hidden size 64: a step takes milliseconds.
    """
    import torch  # noqa: PLC0415 - loads for seconds
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    tiny_folder(path, context_length=CONTEXT_LENGTH)
    config = LlamaConfig.from_pretrained(path, local_files_only=True, initializer_range=_SPREAD)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # Not by its save_pretrained, which would write the configuration anew.
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    return path


def torch_engine(
    folder: Path,
    config: TorchConfig = CONFIG,
    *,
    clock: Clock | None = None,
    name: str = "tiny",
    rng: random.Random | None = None,
) -> BatchEngine[TorchSequence]:
    """Return a torch engine with an identity of its own, not started."""
    worker_id = f"torch-{next(_workers)}"
    seat = Seat(worker_id, uuid.uuid4().hex, Role.DECODE, folder, name)
    return create(config, seat, clock=clock or SystemClock(), rng=rng or random.Random(0))


class TorchRig:
    """New engines on the tiny Llama for each test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        info = read_info(folder)
        self._vocab_size = info.vocab_size
        self.eos = info.eos_token_ids[0]

    def prompt(self, tokens: int, variant: int = 0) -> list[int]:
        """Return seeded random token ids."""
        rng = random.Random(variant)
        first = variant % self._vocab_size
        return [first, *(rng.randrange(self._vocab_size) for _ in range(tokens - 1))]

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

    def fresh(self) -> BatchEngine[TorchSequence]:
        """Return a new engine."""
        return torch_engine(self._folder)

    def broken(self) -> BatchEngine[TorchSequence]:
        """Return an engine whose model is not there."""
        return torch_engine(self._folder / "missing")


@asynccontextmanager
async def torch_rig() -> AsyncIterator[EngineRig]:
    """Yield the torch engine's rig."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-tiny-") as scratch:
        folder = await asyncio.to_thread(tiny_llama, Path(scratch) / "tiny")
        yield TorchRig(folder)
