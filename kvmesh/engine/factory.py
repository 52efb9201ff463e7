"""Where engines are made, by name. An adapter is imported only when it is chosen."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvmesh.clock import Clock
from kvmesh.engine.base import AsyncEngine, Seat
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.torch.config import TorchConfig
from kvmesh.engine.vllm.settings import VllmConfig
from kvmesh.errors import InvalidRequestError
from kvmesh.models import read_info

NAMES = ("sim", "torch", "vllm")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which engine a worker runs, and the settings of each that it may run."""

    name: str = field(default="sim", metadata={"help": "Engine to run.", "choices": NAMES})
    sim: SimConfig = field(default_factory=SimConfig)
    torch: TorchConfig = field(default_factory=TorchConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)


def create(config: EngineConfig, seat: Seat, *, clock: Clock, rng: random.Random) -> AsyncEngine:
    """Return the engine that `config` names, for this seat, not started yet.

    Raises `InvalidRequestError` for an unknown name.
    """
    if config.name == "sim":
        from kvmesh.engine.sim.engine import SimEngine

        return SimEngine(
            _fitted(config.sim, seat.model),
            model=seat.name,
            worker_id=seat.worker_id,
            epoch=seat.epoch,
            clock=clock,
            rng=rng,
        )
    if config.name == "torch":
        from kvmesh.engine import torch

        return torch.create(config.torch, seat, clock=clock, rng=rng)
    if config.name == "vllm":
        from kvmesh.engine import vllm

        return vllm.create(config.vllm, seat, clock)
    raise InvalidRequestError(
        f"unknown engine {config.name!r}: choose one of {', '.join(NAMES)}", field="name"
    )


def _fitted(config: SimConfig, folder: Path) -> SimConfig:
    """Keep a simulated engine to what the model's tokenizer and context can hold."""
    info = read_info(folder)
    vocabulary = min(config.vocab_size, info.vocab_size)
    # Special ids come first in most vocabularies, what can't be read alone next.
    sample_from = config.sample_from if config.sample_from < vocabulary else vocabulary * 2 // 3
    return replace(
        config,
        vocab_size=vocabulary,
        sample_from=sample_from,
        context_length=min(config.context_length, info.context_length),
        eos_token_id=next(iter(info.eos_token_ids), config.eos_token_id),
    )
