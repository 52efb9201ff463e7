"""Our light engine: a decoder-only Hugging Face model on a paged KV pool.

Importing this imports no torch.
"""

import random

from kvmesh.clock import Clock
from kvmesh.engine.base import Seat
from kvmesh.engine.batch_engine import BatchEngine
from kvmesh.engine.torch.config import NAME, TorchConfig
from kvmesh.engine.torch.sequence import TorchSequence

__all__ = ["NAME", "TorchConfig", "TorchSequence", "create"]


def create(
    config: TorchConfig, seat: Seat, *, clock: Clock, rng: random.Random
) -> BatchEngine[TorchSequence]:
    """Return an engine that has not started yet."""
    from kvmesh.engine.torch.stepper import TorchStepper

    stepper = TorchStepper(config, seat, clock=clock, rng=rng)
    return BatchEngine(stepper, config.traits(seat), clock)
