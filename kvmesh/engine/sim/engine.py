"""The simulated engine: everything an engine can do, without a model."""

import random

from kvmesh.clock import Clock
from kvmesh.engine.batch_engine import BatchEngine
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.model import KvMemory
from kvmesh.engine.sim.sequence import SimSequence
from kvmesh.engine.sim.stepper import SimStepper
from kvmesh.engine.stepper import CONCURRENT, Traits


class SimEngine(BatchEngine[SimSequence]):
    """A `BatchEngine` without a model.

    `model` is the name it serves; `worker_id` and `epoch` go into its tickets. Answers
    are those of `kvmesh.engine.sim.model.expected`.
    """

    def __init__(
        self,
        config: SimConfig,
        *,
        model: str,
        worker_id: str,
        epoch: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        traits = Traits(
            worker_id=worker_id,
            epoch=epoch,
            max_batch=config.max_batch,
            max_queue=config.max_queue,
            lease_seconds=config.lease_seconds,
            pull_timeout_seconds=config.pull_timeout_seconds,
            concurrent=config.handoff == CONCURRENT,
            wait_seconds=config.handoff_wait_seconds,
            lose_leases=config.faults.drop_leases,
        )
        stepper = SimStepper(config, model=model, epoch=epoch, clock=clock, rng=rng)
        self._simulated = stepper
        super().__init__(stepper, traits, clock)

    @property
    def memory(self) -> KvMemory:
        """The KV itself of a started engine, for tests that tamper with it."""
        return self._simulated.memory
