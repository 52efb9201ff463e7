"""An engine that batches, around whatever computes its steps.

One task runs the step loop; everything else is called in the same event loop, between
steps or while one is computed elsewhere. Each pull of a ticket's blocks is a task of its own.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from kvmesh.clock import Clock
from kvmesh.engine.base import (
    Announce,
    EngineInfo,
    EngineRequest,
    Finish,
    Prefilled,
    Step,
    StepSink,
)
from kvmesh.engine.batch import Batch, S
from kvmesh.engine.handoff import Handoff, Terms
from kvmesh.engine.pulls import Pulls
from kvmesh.engine.sequence import BatchSequence, Kind, Phase
from kvmesh.engine.stepper import Stepper, Traits
from kvmesh.engine.stepping import StepInbox
from kvmesh.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    TicketError,
    TransferError,
)
from kvmesh.kv.base import KvTransport
from kvmesh.kv.pool import BlockPool
from kvmesh.types import KvEvent, KvTicket, Load, Sampling

log = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 1.0
_NO_ANSWER = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class _Parts(Generic[S]):
    """What exists from the start to the end of a started engine."""

    pool: BlockPool
    batch: Batch[S]
    handoff: Handoff
    pulls: Pulls[S]
    transport: KvTransport
    loop: asyncio.Task[None]


class BatchEngine(Generic[S]):
    """An `AsyncEngine` that can do all that some engines can, see `kvmesh.engine.base`."""

    def __init__(self, stepper: Stepper[S], traits: Traits, clock: Clock) -> None:
        self._stepper = stepper
        self._traits = traits
        self._clock = clock
        self._sequences: dict[str, S] = {}
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
            wait_seconds=traits.wait_seconds,
            pull_timeout_seconds=traits.pull_timeout_seconds,
        )
        handoff = Handoff(terms, transport, self._clock, self._free)
        pulls = Pulls(batch, handoff, stepper, ended=self._pulled, free=self._free)
        self._failure = ""
        loop = asyncio.create_task(self._run(), name=f"{info.engine}-engine")
        self._parts = _Parts(pool, batch, handoff, pulls, transport, loop)
        return replace(info, concurrent_handoff=traits.concurrent)

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
        step = await self._outcome(sequence, inbox)
        return Prefilled(
            step.token_ids, sequence.cached_tokens, sequence.ticket, step.finish, step.logprobs
        )

    async def prefill_announced(self, request: EngineRequest, announce: Announce) -> Prefilled:
        """Compute a prompt behind its ticket, as `ConcurrentPrefillEngine` promises."""
        inbox = StepInbox()
        self._stepper.sequence(request, Kind.PREFILL, None, inbox.put)  # refuses what can't be run
        unsampled = replace(request, sampling=_NO_ANSWER)
        sequence = self._submit(unsampled, Kind.PREFILL, None, inbox.put)
        sequence.left += 1  # the token that nobody wants is not the end
        sequence.announce = announce
        await self._outcome(sequence, inbox)
        return Prefilled((), sequence.cached_tokens, sequence.ticket)

    async def release(self, ticket_id: str) -> bool:
        """Free the blocks of a ticket; False if it is not held."""
        parts = self._parts
        if parts is None or parts.handoff.release(ticket_id):
            return parts is not None
        for sequence in self._sequences.values():
            if _announced(sequence) == ticket_id:
                self._fail(parts, sequence, TicketError("the ticket was given back"))
                return True
        return False

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
            self._fail_all(parts)
            parts.handoff.close()
            self._stepper.close()
            await parts.transport.aclose()
            await parts.pulls.aclose()
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

    async def _outcome(self, sequence: S, inbox: StepInbox) -> Step:
        """Wait for the outcome of a prefill; cancelled, it leaves no lease."""
        try:
            return await inbox.get()
        except asyncio.CancelledError:
            self._cancel(sequence)
            if sequence.ticket is not None and self._parts is not None:
                self._parts.handoff.release(sequence.ticket.ticket_id)
            raise

    async def _iterate(
        self, request: EngineRequest, kind: Kind, ticket: KvTicket | None
    ) -> AsyncGenerator[Step, None]:
        inbox, parts = StepInbox(), self._started
        sequence = self._submit(request, kind, ticket, inbox.put)
        try:
            while True:
                step = await inbox.get()
                yield step
                if step.finish is not None:
                    return
        finally:
            self._cancel(sequence)
            await parts.pulls.settled(sequence)

    def _cancel(self, sequence: S) -> bool:
        request_id = sequence.request.request_id
        if self._sequences.get(request_id) is not sequence:
            return False
        del self._sequences[request_id]
        sequence.sink = None
        parts = self._parts
        if parts is not None and sequence.phase is Phase.PULLING:
            parts.pulls.leave(sequence)
        elif parts is not None:
            self._remove(parts, sequence)
            self._wake.set()
        return True

    @property
    def _started(self) -> _Parts[S]:
        if self._parts is None:
            raise EngineError(self._failure)
        return self._parts

    async def _run(self) -> None:
        """Step until cancelled; a crash ends every request and the engine with it."""
        try:
            await self._loop(self._started)
        except Exception as error:  # the top of a background task
            log.exception("the engine died")
            self._failure = f"the engine died: {type(error).__name__}"
            self._fail_all(self._started)

    async def _loop(self, parts: _Parts[S]) -> None:
        batch = parts.batch
        while True:
            for sequence in batch.admit():
                if sequence.phase is Phase.PULLING:
                    parts.pulls.start(sequence)
                elif sequence.announce is not None:
                    self._announce(sequence, sequence.announce)
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

    def _announce(self, sequence: S, announce: Announce) -> None:
        """Give a prompt's ticket out, which has its blocks, but is not computed."""
        digest = self._stepper.digest(sequence)
        ticket = self._started.handoff.announce(sequence.blocks, sequence.prompt_length, digest)
        sequence.ticket = ticket
        announce(ticket, sequence.cached_tokens)

    def _lease(self, sequence: S) -> None:
        """Turn a computed prompt's blocks into a ticket's."""
        parts = self._started
        self._stepper.lend(sequence.blocks)
        if sequence.ticket is None:
            digest = self._stepper.digest(sequence)
            sequence.ticket = parts.handoff.hold(sequence.blocks, sequence.tokens, digest)
        else:
            parts.handoff.fulfil(sequence.ticket.ticket_id, sequence.blocks)
        sequence.blocks = []
        sequence.phase = Phase.ENDED
        if self._traits.lose_leases:
            parts.handoff.release(sequence.ticket.ticket_id)

    def _pulled(self, sequence: S, error: Exception | None) -> None:
        if error is not None:
            self._tell_failure(sequence, error)
        self._wake.set()

    def _fail(self, parts: _Parts[S], sequence: S, error: Exception) -> None:
        self._remove(parts, sequence)
        self._tell_failure(sequence, error)

    def _fail_all(self, parts: _Parts[S]) -> None:
        """End every request. Blocks being pulled stay until the pull has ended."""
        error = EngineError(self._failure)
        for sequence in list(self._sequences.values()):
            if sequence.phase is Phase.PULLING:
                self._tell_failure(sequence, error)
                parts.pulls.leave(sequence)
            else:
                self._fail(parts, sequence, error)

    def _tell_failure(self, sequence: S, error: Exception) -> None:
        sink, sequence.sink = sequence.sink, None
        if sink is not None:
            del self._sequences[sequence.request.request_id]
            sink(error)

    def _remove(self, parts: _Parts[S], sequence: S) -> None:
        """Free what a sequence holds; nobody can pull its blocks from now on."""
        if (ticket_id := _announced(sequence)) is not None:
            parts.handoff.withdraw(ticket_id)
        parts.batch.remove(sequence)

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


def _announced(sequence: BatchSequence) -> str | None:
    """Return the ticket under which a prompt is promised."""
    if sequence.announce is None or sequence.ticket is None:
        return None
    return sequence.ticket.ticket_id
