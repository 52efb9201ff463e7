"""The model of a torch engine, in a thread of its own."""

import asyncio
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_64_intdigest

from kvmesh.clock import Clock
from kvmesh.engine.base import EngineInfo, EngineRequest, Finish, Seat, StepSink
from kvmesh.engine.batch import Batch
from kvmesh.engine.handoff import Offer
from kvmesh.engine.sequence import Kind, Limits
from kvmesh.engine.torch.config import NAME, TorchConfig
from kvmesh.engine.torch.plan import commit, plan
from kvmesh.engine.torch.sequence import Knobs, TorchSequence, read_defaults
from kvmesh.errors import EngineError, MeshError, TicketError
from kvmesh.kv.base import KvTransport, OnPulled, PoolLayout
from kvmesh.kv.blocks import pack
from kvmesh.kv.transports import open_host_pool
from kvmesh.types import KvTicket

if TYPE_CHECKING:  # loads torch
    from kvmesh.engine.torch.loading import Loaded
    from kvmesh.engine.torch.runner import Runner

T = TypeVar("T")

_LAYOUT_REVISION = 1  # counts changes of how KV lies in a block


class TorchStepper:
    """A `Stepper`. Torch is loaded and used in one thread, off the event loop."""

    def __init__(
        self, config: TorchConfig, seat: Seat, *, clock: Clock, rng: random.Random
    ) -> None:
        self._config = config
        self._seat = seat
        self._clock = clock
        self._rng = rng
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine")
        self._limits = Limits(0, 0, frozenset(), 0)
        self._defaults = Knobs()
        self._layout = PoolLayout(0, 0)
        self._loaded: Loaded | None = None
        self._runner: Runner | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the loaded model."""
        return self._layout.block_bytes

    async def load(self) -> EngineInfo:
        """Load torch and the model."""
        config, seat = self._config, self._seat
        try:
            self._defaults = read_defaults(seat.model)
            loaded = self._loaded = await self._in_thread(self._load)
        except EngineError:
            raise
        except MeshError as error:
            raise EngineError(error.message) from error
        layout = self._layout = loaded.shape.layout(config.kv_cache_mb, config.block_size)
        longest = min(loaded.context_length, layout.total_blocks * config.block_size)
        vocab_size = loaded.info.vocab_size
        ends = frozenset(loaded.info.eos_token_ids)
        self._limits = Limits(vocab_size, longest, ends, choices=vocab_size)
        return EngineInfo(
            engine=NAME,
            model=seat.name,
            context_length=longest,
            vocab_size=vocab_size,
            block_size=config.block_size,
            total_blocks=layout.total_blocks,
            layout_fingerprint=self._fingerprint(loaded),
            continues_first_token=True,
        )

    def open(self, on_pulled: OnPulled) -> KvTransport:
        """Make the pool."""
        from kvmesh.engine.torch.runner import Runner

        if self._loaded is None:
            raise EngineError("no model is loaded")
        host = open_host_pool(
            self._config.kv_transport,
            self._layout,
            epoch=self._seat.epoch,
            clock=self._clock,
            on_pulled=on_pulled,
        )
        self._runner = Runner(self._loaded, self._layout, host.memory, self._config)
        return host.transport

    def sequence(
        self, request: EngineRequest, kind: Kind, ticket: KvTicket | None, sink: StepSink
    ) -> TorchSequence:
        """Return a valid sequence for a request."""
        sequence = TorchSequence(request, kind, ticket, sink, self._limits)
        sequence.pick_with(self._defaults, self._rng)
        return sequence

    def digest(self, sequence: TorchSequence) -> int:
        """Digest the prompt: a ticket is for its own only."""
        return xxh3_64_intdigest(pack(sequence.tokens[: sequence.prompt_length]))

    def check(self, sequence: TorchSequence, offer: Offer) -> None:
        """Refuse the ticket of another prompt."""
        if offer.digest != self.digest(sequence):
            raise TicketError("the ticket is for another prompt")

    def adopt(self, sequence: TorchSequence, offer: Offer, blocks: Sequence[int]) -> None:
        """Take pulled blocks over; the transport vouches for them."""
        self._started.memory.adopt(blocks)

    def lend(self, blocks: Sequence[int]) -> None:
        """Make blocks ready to be pulled."""
        self._started.memory.lend(blocks)

    async def step(
        self, batch: Batch[TorchSequence]
    ) -> Sequence[tuple[TorchSequence, int, Finish | None]]:
        """Compute one step."""
        spans = plan(batch, self._config.max_batch_tokens)
        if not spans:
            return ()
        runner = self._started
        return commit(batch, await self._in_thread(lambda: runner.run(spans)))

    def close(self) -> None:
        """Let go of the pool's memory."""
        self._runner = None

    async def aclose(self) -> None:
        """End the thread, once it is idle, and let go of the model."""
        self._loaded = None
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def _started(self) -> "Runner":
        if self._runner is None:
            raise EngineError("the engine has no pool")
        return self._runner

    def _load(self) -> "Loaded":
        # Read when torch is imported. Threads that wait for work by spinning make two engines
        # on one machine several times slower than threads that sleep.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 - for OpenMP
        try:
            from kvmesh.engine.torch.loading import load
        except ImportError as error:
            raise EngineError(f"the torch engine needs torch and transformers: {error}") from error
        return load(self._seat.model, self._config)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; when cancelled, stay until it is done."""
        working = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            if not working.cancelled():
                working.exception()  # seen; the cancellation is what counts
            raise

    def _fingerprint(self, loaded: "Loaded") -> str:
        shared = (
            NAME,
            _LAYOUT_REVISION,
            self._seat.name,
            loaded.digest,
            loaded.shape.layers,
            loaded.shape.kv_heads,
            loaded.shape.head_dim,
            str(loaded.shape.dtype),
            self._config.block_size,
            self._config.kv_transport,
        )
        return hashlib.sha256(repr(shared).encode()).hexdigest()[:32]
