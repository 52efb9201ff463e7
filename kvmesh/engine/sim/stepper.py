"""The simulated model as the stepper of an engine: takes time, and fails when told to."""

import asyncio
import random
from collections.abc import Sequence

from kvmesh.clock import Clock
from kvmesh.engine.base import EngineInfo, EngineRequest, Finish, StepSink
from kvmesh.engine.batch import Batch
from kvmesh.engine.handoff import Offer
from kvmesh.engine.sequence import Kind
from kvmesh.engine.sim.compute import Computer
from kvmesh.engine.sim.config import NAME, SimConfig
from kvmesh.engine.sim.faults import Injector
from kvmesh.engine.sim.model import KvMemory
from kvmesh.engine.sim.sequence import SimSequence
from kvmesh.errors import EngineError, OverloadedError, TransferError
from kvmesh.kv.base import KvTransport, OnPulled
from kvmesh.kv.transports import open_host_pool
from kvmesh.types import KvTicket


class SimStepper:
    """A `Stepper` without a model. `model` is the name it serves."""

    def __init__(
        self, config: SimConfig, *, model: str, epoch: str, clock: Clock, rng: random.Random
    ) -> None:
        self._config = config
        self._name = model
        self._epoch = epoch
        self._clock = clock
        self._rng = rng
        self._injector = Injector(config.faults)
        self._computer: Computer | None = None
        self._due = 0.0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._config.pool_layout.block_bytes

    @property
    def memory(self) -> KvMemory:
        """The KV itself, once opened."""
        return self._started.memory

    async def load(self) -> EngineInfo:
        """Take the time that loading takes."""
        config = self._config
        await self._injector.before_start()
        return EngineInfo(
            engine=NAME,
            model=self._name,
            context_length=config.longest,
            vocab_size=config.vocab_size,
            block_size=config.block_size,
            total_blocks=config.total_blocks,
            layout_fingerprint=config.layout_fingerprint(self._name),
            continues_first_token=True,
        )

    def open(self, on_pulled: OnPulled) -> KvTransport:
        """Make the pool."""
        config = self._config
        host = open_host_pool(
            config.kv_transport,
            config.pool_layout,
            epoch=self._epoch,
            clock=self._clock,
            on_pulled=on_pulled,
        )
        memory = KvMemory(host.memory, config.block_size)
        self._computer = Computer(config.model(self._name), memory, config.max_batch_tokens)
        return host.transport

    def sequence(
        self, request: EngineRequest, kind: Kind, ticket: KvTicket | None, sink: StepSink
    ) -> SimSequence:
        """Return a valid sequence for a request, unless told to refuse its kind."""
        config = self._config
        if config.faults.refuse == kind.value:
            raise OverloadedError(f"{kind.value} is refused (injected)")
        sequence = SimSequence(request, kind, ticket, sink, config.limits)
        samples_eos = config.eos_probability > 0 or config.sample_from <= config.eos_token_id
        sampling = request.sampling
        sequence.steered = bool(sampling.logit_bias or sampling.allowed_token_ids)
        sequence.special = bool(
            samples_eos
            or sequence.stops
            or sequence.banned
            or sequence.bad_words
            or sequence.steered
            or sampling.logprobs is not None
        )
        if sampling.temperature:  # greedy is also the default
            sequence.mix = _stream(self._rng, sampling.seed)
        return sequence

    def digest(self, sequence: SimSequence) -> int:
        """Return the digest of the prompt's KV."""
        return sequence.digest

    def check(self, sequence: SimSequence, offer: Offer) -> None:
        """Refuse nothing: the KV itself tells, once it is here."""

    def adopt(self, sequence: SimSequence, offer: Offer, blocks: Sequence[int]) -> None:
        """See that the pulled KV is what prefill computed."""
        computer, faults = self._started, self._config.faults
        if faults.spoil_blocks:
            computer.memory.spoil(blocks[-faults.spoil_blocks :])
        found = computer.adopt(sequence)
        if offer.digest not in (0, found) and self._config.verify_content:
            raise TransferError("the pulled KV is not what prefill computed")

    def lend(self, blocks: Sequence[int]) -> None:
        """Do nothing: blocks can be pulled where they are."""

    async def step(
        self, batch: Batch[SimSequence]
    ) -> Sequence[tuple[SimSequence, int, Finish | None]]:
        """Compute one step and take its time."""
        await self._injector.before_step()
        latency, loop = self._config.latency, asyncio.get_running_loop()
        if not latency.waits:
            outcome = self._started.step(batch)
            await asyncio.sleep(0)
            return outcome.tokens
        due = max(self._due, loop.time())
        outcome = self._started.step(batch)
        self._due = due + latency.step_seconds(
            outcome.prefill_tokens, outcome.decodes, outcome.kv_tokens
        )
        await asyncio.sleep(max(0.0, self._due - loop.time()))
        return outcome.tokens

    def close(self) -> None:
        """Release the pool's memory."""
        if self._computer is not None:
            self._computer.memory.close()
            self._computer = None

    async def aclose(self) -> None:
        """Do nothing more."""

    @property
    def _started(self) -> Computer:
        if self._computer is None:
            raise EngineError("the engine has no pool")
        return self._computer


def _stream(rng: random.Random, seed: int | None) -> int:
    """Return the random stream of a seed. It is not 0, which is greedy, below 2**64 either."""
    number = rng.getrandbits(63) if seed is None else seed
    return number + 1 if number >= 0 else number
