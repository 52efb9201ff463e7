"""An engine that batches, around whatever computes its steps.

One task runs the step loop; everything else is called in the same event loop, between
steps or while one is computed elsewhere. Each pull of a ticket's blocks is a task of its own.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from kvmesh.clock import Clock
from kvmesh.engine.base import EngineInfo, EngineRequest, Finish, Prefilled, Step, StepSink
from kvmesh.engine.batch import Batch, S
from kvmesh.engine.handoff import Handoff, Terms, unpack
from kvmesh.engine.sequence import Kind, Phase
from kvmesh.engine.stepper import Stepper, Traits
from kvmesh.engine.stepping import StepInbox
from kvmesh.errors import (
    EngineError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
    TransferError,
)
from kvmesh.kv.base import KvTransport, StillWritingError
from kvmesh.kv.pool import BlockPool
from kvmesh.types import KvEvent, KvTicket, Load

log = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 1.0


@dataclass(slots=True)
class _Parts(Generic[S]):
    """What exists from the start to the end of a started engine."""

    pool: BlockPool
    batch: Batch[S]
    handoff: Handoff
    transport: KvTransport
    loop: asyncio.Task[None]


class BatchEngine(Generic[S]):
    """An `AsyncEngine`, `PrefillEngine`, `ResumeEngine`, `KvEventSource` and `StepEngine`."""

    def __init__(self, stepper: Stepper[S], traits: Traits, clock: Clock) -> None:
        self._stepper = stepper
        self._traits = traits
        self._clock = clock
        self._sequences: dict[str, S] = {}
        self._pulls: dict[S, asyncio.Task[None]] = {}
        self._subscribers: dict[object, Callable[[KvEvent], None]] = {}
        self._wake = asyncio.Event()
        self._failure = "the engine has not been started"
        self._parts: _Parts[S] | None = None

    async def start(self) -> EngineInfo:
        """Load the model, make the pool and start the step loop."""
        stepper, traits = self._stepper, self._traits
        info = await stepper.load()
        pool = BlockPool(info.total_blocks, self._tell)
        batch: Batch[S] = Batch(
            pool, block_size=info.block_size, max_batch=traits.max_batch, salt=info.model
        )
        try:
            transport = stepper.open(self._on_pulled)
        except (TransferError, OSError) as error:
            raise EngineError(f"the engine has no pool for its KV: {error}") from error
        terms = Terms(
            engine=info.engine,
            backend=transport.backend,
            worker_id=traits.worker_id,
            epoch=traits.epoch,
            layout_fingerprint=info.layout_fingerprint,
            block_size=info.block_size,
            block_bytes=stepper.block_bytes,
            lease_seconds=traits.lease_seconds,
            pull_timeout_seconds=traits.pull_timeout_seconds,
        )
        handoff = Handoff(terms, transport, self._clock, self._free)
        self._failure = ""
        loop = asyncio.create_task(self._run(batch), name=f"{info.engine}-engine")
        self._parts = _Parts(pool, batch, handoff, transport, loop)
        return info

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
            if sequence.ticket is not None and self._parts is not None:
                self._parts.handoff.release(sequence.ticket.ticket_id)
            raise
        return Prefilled(
            step.token_ids, sequence.cached_tokens, sequence.ticket, step.finish, step.logprobs
        )

    async def release(self, ticket_id: str) -> bool:
        """Free the blocks of a ticket; False if it is not held."""
        return self._parts is not None and self._parts.handoff.release(ticket_id)

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
        return self._parts.pool.snapshot() if self._parts is not None else ()

    def subscribe(self, sink: Callable[[KvEvent], None]) -> Callable[[], None]:
        """Call `sink` with every later change of the cache."""
        name = object()
        self._subscribers[name] = sink
        return lambda: self._forget(name)

    @property
    def preemptions(self) -> int:
        """How often a started engine took a sequence's blocks for another."""
        return self._started.batch.preemptions

    def load(self) -> Load:
        """Return what the engine is busy with. A request being pulled for is running."""
        if self._parts is None:
            return Load()
        batch, pool, handoff = self._parts.batch, self._parts.pool, self._parts.handoff
        return Load(
            running=batch.busy,
            waiting=len(batch.waiting),
            used_blocks=pool.used,
            total_blocks=pool.total_blocks,
            ticket_blocks=handoff.ledger.blocks,
            ticket_bytes=handoff.ledger.byte_count,
            received_bytes=handoff.received_bytes,
            received_seconds=handoff.received_seconds,
        )

    def check(self) -> None:
        """Raise `EngineError` unless the step loop runs."""
        if self._failure:
            raise EngineError(self._failure)

    async def aclose(self) -> None:
        """Fail what still runs, end all leases and give the memory back."""
        parts, self._parts = self._parts, None
        self._failure = "the engine was closed"
        if parts is not None:
            parts.loop.cancel()
            await asyncio.wait([parts.loop])
            self._fail_all(parts.batch)
            parts.handoff.close()
            self._stepper.close()
            await parts.transport.aclose()
            if self._pulls:
                await asyncio.wait(self._pulls.values())
        self._stepper.close()
        await self._stepper.aclose()

    def _submit(
        self, request: EngineRequest, kind: Kind, ticket: KvTicket | None, sink: StepSink
    ) -> S:
        self.check()
        if request.request_id in self._sequences:
            raise InvalidRequestError(
                f"request {request.request_id} is running already", field="request_id"
            )
        sequence = self._stepper.sequence(request, kind, ticket, sink)
        parts = self._started
        if ticket is not None:
            self._stepper.check(sequence, parts.handoff.check(ticket, sequence.prompt_length))
        if len(parts.batch.waiting) >= self._traits.max_queue:
            raise OverloadedError(
                f"{len(parts.batch.waiting)} requests wait already",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        parts.batch.add(sequence)
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

    def _cancel(self, sequence: S) -> bool:
        request_id = sequence.request.request_id
        if self._sequences.get(request_id) is not sequence:
            return False
        del self._sequences[request_id]
        sequence.sink = None
        if sequence.phase is not Phase.PULLING and self._parts is not None:
            self._parts.batch.remove(sequence)
            self._wake.set()
        return True

    @property
    def _started(self) -> _Parts[S]:
        if self._parts is None:
            raise EngineError(self._failure)
        return self._parts

    async def _run(self, batch: Batch[S]) -> None:
        """Step until cancelled; a crash ends every request and the engine with it."""
        try:
            await self._loop(batch)
        except Exception as error:  # the top of a background task
            log.exception("the engine died")
            self._failure = f"the engine died: {type(error).__name__}"
            self._fail_all(batch)

    async def _loop(self, batch: Batch[S]) -> None:
        while True:
            for sequence in batch.admit():
                pull = asyncio.create_task(self._pull(batch, sequence), name="pull")
                self._pulls[sequence] = pull
            if not batch.running and not batch.prompts:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._deliver(await self._stepper.step(batch))

    def _deliver(self, outcome: Iterable[tuple[S, int, Finish | None]]) -> None:
        """Hand a step's tokens out, one call per request. Cancelled ones get none."""
        for sequence, token, finish in outcome:
            sink = sequence.sink
            if sink is None:
                continue
            if finish is not None or sequence.phase is Phase.HELD:
                del self._sequences[sequence.request.request_id]
                sequence.sink = None
                if finish is None:
                    self._lease(sequence)
            logprob, scores = sequence.logprob, sequence.scores
            sequence.scores = None
            logprobs = None if logprob is None else (logprob,)
            sink(Step((token,), finish, logprobs, scores, sequence.cached_tokens))

    def _lease(self, sequence: S) -> None:
        """Turn a computed prompt's blocks into a ticket's."""
        parts = self._started
        self._stepper.lend(sequence.blocks)
        digest = self._stepper.digest(sequence)
        sequence.ticket = parts.handoff.hold(sequence.blocks, sequence.tokens, digest)
        sequence.blocks = []
        sequence.phase = Phase.ENDED
        if self._traits.lose_leases:
            parts.handoff.release(sequence.ticket.ticket_id)

    async def _pull(self, batch: Batch[S], sequence: S) -> None:
        """Fetch a prompt's blocks and let the sequence run."""
        try:
            await self._fetch(batch, sequence)
        except MeshError as error:
            self._fail(batch, sequence, error)
        except Exception as error:  # the top of a background task
            log.exception("a pull failed")
            self._fail(batch, sequence, TransferError(f"the pull failed: {type(error).__name__}"))
        finally:
            del self._pulls[sequence]
            self._wake.set()

    async def _fetch(self, batch: Batch[S], sequence: S) -> None:
        ticket, parts = sequence.ticket, self._started
        assert ticket is not None  # only sequences with one are pulled for
        skip = sequence.computed // batch.block_size
        blocks = sequence.blocks[skip : -(-sequence.prompt_length // batch.block_size)]
        try:
            await parts.handoff.pull(ticket, blocks, skip)
        except StillWritingError as error:
            kept, sequence.blocks = sequence.blocks, []
            error.settled.add_done_callback(lambda _: self._free(kept))
            raise
        if sequence.sink is None:
            batch.remove(sequence)
            return
        self._stepper.adopt(sequence, unpack(ticket.engine_params), blocks)
        batch.join(sequence)

    def _fail(self, batch: Batch[S], sequence: S, error: Exception) -> None:
        batch.remove(sequence)
        sink, sequence.sink = sequence.sink, None
        if sink is not None:
            del self._sequences[sequence.request.request_id]
            sink(error)

    def _fail_all(self, batch: Batch[S]) -> None:
        """End every request. Blocks being pulled stay until the pull has ended."""
        error = EngineError(self._failure)
        for sequence in list(self._sequences.values()):
            if sequence.phase is Phase.PULLING:
                sink, sequence.sink = sequence.sink, None
                del self._sequences[sequence.request.request_id]
                if sink is not None:
                    sink(error)
            else:
                self._fail(batch, sequence, error)

    def _on_pulled(self, ticket_id: str) -> None:
        if self._parts is not None:
            self._parts.handoff.on_pulled(ticket_id)

    def _free(self, blocks: Sequence[int]) -> None:
        if self._parts is not None:
            self._parts.pool.release(blocks)
            self._wake.set()

    def _tell(self, event: KvEvent) -> None:
        for subscriber in tuple(self._subscribers.values()):
            subscriber(event)

    def _forget(self, subscriber: object) -> None:
        self._subscribers.pop(subscriber, None)
