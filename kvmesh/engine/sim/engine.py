"""The simulated engine: everything an engine can do, without a model.

One task runs the step loop and owns the scheduler; everything else is called in the same
event loop between its steps. Each pull of a ticket's blocks is a task of its own.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from kvmesh.clock import Clock
from kvmesh.engine.base import EngineInfo, EngineRequest, Prefilled, Step, StepSink
from kvmesh.engine.sim.config import NAME, SimConfig
from kvmesh.engine.sim.faults import Injector
from kvmesh.engine.sim.handoff import Handoff, Terms
from kvmesh.engine.sim.model import KvMemory
from kvmesh.engine.sim.scheduler import Outcome, Scheduler
from kvmesh.engine.sim.sequence import Kind, Phase, SimSequence, build
from kvmesh.engine.stepping import StepInbox
from kvmesh.errors import (
    EngineError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
    TransferError,
)
from kvmesh.kv.base import KvTransport
from kvmesh.kv.pool import BlockPool
from kvmesh.kv.transports import open_host_pool
from kvmesh.types import KvEvent, KvTicket, Load

log = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 1.0


@dataclass(slots=True)
class _Parts:
    """What exists from the start to the end of a started engine."""

    memory: KvMemory
    transport: KvTransport
    scheduler: Scheduler
    loop: asyncio.Task[None]


class SimEngine:
    """An `AsyncEngine`, `PrefillEngine`, `ResumeEngine`, `KvEventSource` and `StepEngine`.

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
        self._config = config
        self._name = model
        self._epoch = epoch
        self._clock = clock
        self._rng = rng
        self._sequences: dict[str, SimSequence] = {}
        self._pulls: dict[SimSequence, asyncio.Task[None]] = {}
        self._subscribers: dict[object, Callable[[KvEvent], None]] = {}
        self._wake = asyncio.Event()
        self._injector = Injector(config.faults)
        self._failure = "the engine has not been started"
        self._parts: _Parts | None = None
        self._pool = BlockPool(config.total_blocks, self._tell)
        self._handoff = Handoff(
            Terms(
                engine=NAME,
                backend=config.kv_transport,
                worker_id=worker_id,
                epoch=epoch,
                layout_fingerprint=config.layout_fingerprint(model),
                block_size=config.block_size,
                block_bytes=config.pool_layout.block_bytes,
                lease_seconds=config.lease_seconds,
                pull_timeout_seconds=config.pull_timeout_seconds,
            ),
            clock,
            self._free,
        )

    async def start(self) -> EngineInfo:
        """Make the pool and start the step loop."""
        config = self._config
        await self._injector.before_start()
        try:
            host = open_host_pool(
                config.kv_transport,
                config.pool_layout,
                epoch=self._epoch,
                clock=self._clock,
                on_pulled=self._handoff.on_pulled,
            )
        except (TransferError, OSError) as error:
            raise EngineError(f"the engine has no pool for its KV: {error}") from error
        memory = KvMemory(host.memory, config.block_size)
        model = config.model(self._name)
        scheduler = Scheduler(config, model, memory, self._pool, salt=self._name)
        self._failure = ""
        loop = asyncio.create_task(self._run(scheduler), name="sim-engine")
        self._parts = _Parts(memory, host.transport, scheduler, loop)
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

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step, None]:
        """Prefill and decode, as `AsyncEngine` promises."""
        return self._iterate(request, Kind.GENERATE, None)

    def resume(self, request: EngineRequest, ticket: KvTicket) -> AsyncGenerator[Step, None]:
        """Pull a ticket's blocks and decode, as `ResumeEngine` promises."""
        return self._iterate(request, Kind.RESUME, ticket)

    async def prefill(self, request: EngineRequest) -> Prefilled:
        """Compute a prompt and lease its blocks, as `PrefillEngine` promises."""
        inbox = StepInbox()
        sequence = self._submit(request, Kind.PREFILL, None, inbox.put)
        try:
            step = await inbox.get()
        except asyncio.CancelledError:
            self._cancel(sequence)
            if sequence.ticket is not None:
                self._handoff.release(sequence.ticket.ticket_id)
            raise
        return Prefilled(step.token_ids, sequence.cached_tokens, sequence.ticket, step.finish)

    async def release(self, ticket_id: str) -> bool:
        """Free the blocks of a ticket; False if it is not held."""
        return self._handoff.release(ticket_id)

    def submit(self, request: EngineRequest, ticket: KvTicket | None, sink: StepSink) -> None:
        """Start a request whose steps go to `sink`, as `StepEngine` promises."""
        kind = Kind.GENERATE if ticket is None else Kind.RESUME
        self._submit(request, kind, ticket, sink)

    def cancel(self, request_id: str) -> bool:
        """Free what a request held; blocks being pulled are freed when the pull has ended."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and self._cancel(sequence)

    def snapshot(self) -> Sequence[int]:
        """Return all cached block hashes, a parent before its children."""
        return self._pool.snapshot()

    def subscribe(self, sink: Callable[[KvEvent], None]) -> Callable[[], None]:
        """Call `sink` with every later change of the cache."""
        name = object()
        self._subscribers[name] = sink
        return lambda: self._forget(name)

    @property
    def memory(self) -> KvMemory:
        """The KV itself of a started engine, for tests that tamper with it."""
        return self._started.memory

    @property
    def preemptions(self) -> int:
        """How often a started engine took a sequence's blocks for another."""
        return self._started.scheduler.preemptions

    def load(self) -> Load:
        """Return what the engine is busy with. A request being pulled for is running."""
        if self._parts is None:
            return Load(total_blocks=self._config.total_blocks)
        scheduler, ledger = self._parts.scheduler, self._handoff.ledger
        return Load(
            running=len(scheduler.running) + len(scheduler.prompts) + len(scheduler.pulling),
            waiting=len(scheduler.waiting),
            used_blocks=self._pool.used,
            total_blocks=self._pool.total_blocks,
            ticket_blocks=ledger.blocks,
            ticket_bytes=ledger.byte_count,
            received_bytes=self._handoff.received_bytes,
        )

    def check(self) -> None:
        """Raise `EngineError` unless the step loop runs."""
        if self._failure:
            raise EngineError(self._failure)

    async def aclose(self) -> None:
        """Fail what still runs, end all leases and give the memory back."""
        parts, self._parts = self._parts, None
        self._failure = "the engine was closed"
        if parts is None:
            return
        parts.loop.cancel()
        await asyncio.wait([parts.loop])
        self._fail_all(parts.scheduler)
        self._handoff.close()
        parts.memory.close()
        await parts.transport.aclose()
        if self._pulls:
            await asyncio.wait(self._pulls.values())

    def _submit(
        self, request: EngineRequest, kind: Kind, ticket: KvTicket | None, sink: StepSink
    ) -> SimSequence:
        self.check()
        if request.request_id in self._sequences:
            raise InvalidRequestError(
                f"request {request.request_id} is running already", field="request_id"
            )
        if self._config.faults.refuse == kind.value:
            raise OverloadedError(f"{kind.value} is refused (injected)")
        sequence = build(self._config, request, kind, ticket=ticket, sink=sink, rng=self._rng)
        if ticket is not None:
            self._handoff.check(ticket, sequence.prompt_length)
        scheduler = self._started.scheduler
        if len(scheduler.waiting) >= self._config.max_queue:
            raise OverloadedError(
                f"{len(scheduler.waiting)} requests wait already", retry_after=_RETRY_AFTER_SECONDS
            )
        scheduler.add(sequence)
        self._sequences[request.request_id] = sequence
        self._wake.set()
        return sequence

    async def _iterate(
        self, request: EngineRequest, kind: Kind, ticket: KvTicket | None
    ) -> AsyncGenerator[Step, None]:
        inbox = StepInbox()
        sequence = self._submit(request, kind, ticket, inbox.put)
        try:
            while True:
                step = await inbox.get()
                yield step
                if step.finish is not None:
                    return
        finally:
            self._cancel(sequence)
            if (pull := self._pulls.get(sequence)) is not None:
                await asyncio.wait([pull])

    def _cancel(self, sequence: SimSequence) -> bool:
        request_id = sequence.request.request_id
        if self._sequences.get(request_id) is not sequence:
            return False
        del self._sequences[request_id]
        sequence.sink = None
        if sequence.phase is not Phase.PULLING and self._parts is not None:
            self._parts.scheduler.remove(sequence)
            self._wake.set()
        return True

    @property
    def _started(self) -> _Parts:
        if self._parts is None:
            raise EngineError(self._failure)
        return self._parts

    async def _run(self, scheduler: Scheduler) -> None:
        """Step until cancelled; a crash ends every request and the engine with it."""
        try:
            await self._loop(scheduler)
        except Exception as error:
            log.exception("the simulated engine died")
            self._failure = f"the engine died: {error}"
            self._fail_all(scheduler)

    async def _loop(self, scheduler: Scheduler) -> None:
        loop, latency = asyncio.get_running_loop(), self._config.latency
        due = 0.0
        while True:
            self._admit(scheduler)
            if not scheduler.running and not scheduler.prompts:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._injector.before_step()
            due = max(due, loop.time())
            outcome = scheduler.step()
            due += latency.step_seconds(outcome.prefill_tokens, outcome.decodes, outcome.kv_tokens)
            if latency.waits:
                await asyncio.sleep(max(0.0, due - loop.time()))
                self._deliver(outcome)
            else:
                self._deliver(outcome)
                await asyncio.sleep(0)

    def _admit(self, scheduler: Scheduler) -> None:
        for sequence in scheduler.admit():
            pull = asyncio.create_task(self._pull(scheduler, sequence), name="sim-pull")
            self._pulls[sequence] = pull

    def _deliver(self, outcome: Outcome) -> None:
        """Hand the step's tokens out, one call per request. Cancelled ones get none."""
        for sequence, token, finish in outcome.tokens:
            sink = sequence.sink
            if sink is None:
                continue
            if finish is not None or sequence.phase is Phase.HELD:
                del self._sequences[sequence.request.request_id]
                sequence.sink = None
                if finish is None:
                    self._lease(sequence)
            sink(Step((token,), finish))

    def _lease(self, sequence: SimSequence) -> None:
        """Turn a computed prompt's blocks into a ticket's."""
        sequence.ticket = self._handoff.hold(
            self._started.transport, sequence.blocks, sequence.tokens, sequence.digest
        )
        sequence.blocks = []
        sequence.phase = Phase.ENDED
        if self._config.faults.drop_leases:
            self._handoff.release(sequence.ticket.ticket_id)

    async def _pull(self, scheduler: Scheduler, sequence: SimSequence) -> None:
        """Fetch a prompt's blocks, see that they are right, and let the sequence run."""
        try:
            await self._fetch(scheduler, sequence)
        except MeshError as error:
            self._fail(scheduler, sequence, error)
        except Exception as error:
            log.exception("a pull failed")
            self._fail(scheduler, sequence, TransferError(f"the pull failed: {error!r}"))
        finally:
            del self._pulls[sequence]
            self._wake.set()

    async def _fetch(self, scheduler: Scheduler, sequence: SimSequence) -> None:
        ticket, config = sequence.ticket, self._config
        assert ticket is not None  # only sequences with one are pulled for
        skip = sequence.computed // config.block_size
        blocks = sequence.blocks[skip : -(-sequence.prompt_length // config.block_size)]
        await self._handoff.pull(self._started.transport, ticket, blocks, skip)
        memory = self._started.memory
        if config.faults.spoil_blocks:
            memory.spoil(blocks[-config.faults.spoil_blocks :])
        if sequence.sink is None:
            scheduler.remove(sequence)
            return
        digest = scheduler.adopt(sequence)
        if (
            config.verify_content
            and digest != self._handoff.check(ticket, sequence.prompt_length).digest
        ):
            raise TransferError("the pulled KV is not what prefill computed")
        scheduler.join(sequence)

    def _fail(self, scheduler: Scheduler, sequence: SimSequence, error: Exception) -> None:
        scheduler.remove(sequence)
        sink, sequence.sink = sequence.sink, None
        if sink is not None:
            del self._sequences[sequence.request.request_id]
            sink(error)

    def _fail_all(self, scheduler: Scheduler) -> None:
        """End every request. Blocks being pulled stay until the pull has ended."""
        for sequence in list(self._sequences.values()):
            if sequence.phase is Phase.PULLING:
                sink, sequence.sink = sequence.sink, None
                del self._sequences[sequence.request.request_id]
                if sink is not None:
                    sink(EngineError(self._failure))
            else:
                self._fail(scheduler, sequence, EngineError(self._failure))

    def _free(self, blocks: Sequence[int]) -> None:
        self._pool.release(blocks)
        self._wake.set()

    def _tell(self, event: KvEvent) -> None:
        for subscriber in tuple(self._subscribers.values()):
            subscriber(event)

    def _forget(self, subscriber: object) -> None:
        self._subscribers.pop(subscriber, None)
