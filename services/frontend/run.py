"""The state of one request while it is served, and what is told of it."""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvmesh.clock import Clock
from kvmesh.errors import (
    DeadlineError,
    InvalidRequestError,
    MeshError,
    Reason,
    TicketError,
    TransferError,
)
from kvmesh.host.engine_metrics import ABORT, ERROR
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.status import row
from kvmesh.telemetry import Span, safe_message
from kvmesh.types import Completion, Context, Encoded, Plan, Prompt, Sampling, Usage, Worker
from services.frontend.answer import Answer, Piece
from services.frontend.explanation import Explanation, Failure
from services.frontend.metrics import Ending, FrontendMetrics, Step, reason_of
from services.frontend.request import Request
from services.frontend.usage import total_usage

log = logging.getLogger(__name__)

T = TypeVar("T")


class Run:
    """One request being served: its time, its span, its choices."""

    def __init__(
        self,
        request: Request,
        span: Span,
        metrics: FrontendMetrics,
        clock: Clock,
        explanation: Explanation | None = None,
    ) -> None:
        self.request = request
        self.explanation = explanation
        """What is to be told to the caller, if he wants to know."""
        self.span = span
        self.choices: list[Choice] = []
        self.metrics = metrics
        self.lane = metrics.of(request.model, request.operation)
        self.clock = clock
        self._started = clock.now()
        self._first_token = False

    @property
    def seconds_left(self) -> float:
        """Time until the request's deadline; may be negative."""
        return self.request.deadline - self.clock.now()

    def context(self, span: Span) -> Context:
        """Return what goes with the request to another process, under `span`."""
        request = self.request
        return Context(request.id, request.deadline, span.traceparent, request.priority)

    async def within(self, work: Awaitable[T]) -> T:
        """Wait for `work`, until the deadline at most."""
        try:
            async with asyncio.timeout(self.seconds_left):
                return await work
        except TimeoutError:
            raise DeadlineError("the request's time is up") from None

    def first_token(self) -> None:
        """Note that a choice's first token was generated; the first of them all counts."""
        if not self._first_token and self.request.generate:
            self._first_token = True
            self.span.event("first_token")
            self.lane.first_token(self.clock.now() - self._started)

    def end(self, error: BaseException | None) -> None:
        """Record how the request ended, in its metrics and its span."""
        complete = all(choice.completion for choice in self.choices) and bool(self.choices)
        reason = None if complete else reason_of(error or asyncio.CancelledError())
        usage = None
        if self.choices:
            usage = total_usage(self.request, {c.index: c.ending for c in self.choices})
            self._describe(usage)
        lost = ABORT if reason is Reason.CANCELLED else ERROR
        finished = [choice.finish_reason or lost for choice in self.choices]
        ending = Ending(
            self.clock.now() - self._started,
            reason,
            tuple(finished or [lost]),
            usage,
        )
        self.lane.ended(ending)
        if error is not None and reason not in (None, Reason.CANCELLED):
            log.info("request %s: %s: %s", self.request.id, reason, safe_message(error))

    def _describe(self, usage: Usage) -> None:
        span = self.span
        span.set("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        reasons = [c.finish_reason for c in self.choices if c.finish_reason]
        if reasons:
            span.set("gen_ai.response.finish_reasons", reasons)


@dataclass(frozen=True, slots=True)
class Source:
    """An encoded prompt. The tokenizer that encoded it will do the text as well."""

    prompt: Prompt
    encoded: Encoded
    tokenizer: Peer


class Choice:
    """One answer being made to one prompt: its attempts."""

    def __init__(self, run: Run, index: int, source: Source) -> None:
        request = run.request
        self.run = run
        self.index = index
        self.source = source
        first = index % request.n == 0
        self.prompt_logprobs = request.sampling.prompt_logprobs if first else None
        """How many of the likeliest tokens are told with each of the prompt's; None: nothing is."""
        self.sampling = self._sampling(index % request.n)
        self.excluded: list[Worker] = []
        """Workers that failed this choice."""
        self.tokenizer = source.tokenizer
        """Where its text is made."""
        self.lost: list[Peer] = []
        """Where it was made before, until they were lost."""
        self.local = self.sampling.prompt_logprobs is not None
        """Whether decode is to prefill by itself, whatever the plan says."""
        self.answer: Answer | None = None
        self.completion: Completion | None = None
        """How it ended, once the last piece has gone to the caller."""
        self.echoed = not request.echo and self.prompt_logprobs is None
        """Whether what is wanted of the prompt has gone to the caller."""
        self._first_token: float | None = None
        self._last_text: float | None = None
        self._attempts = 0
        self._step: Step | None = None
        self._plan: Plan | None = None
        self._failure: MeshError | None = None

    @property
    def scores_echo(self) -> bool:
        """Whether the prompt, where it is echoed, comes with log probabilities."""
        request = self.run.request
        scores = request.sampling.logprobs is not None and request.operation != "chat"
        return request.echo and scores

    @property
    def needs_engine(self) -> bool:
        """Whether there is more to do than to echo the prompt."""
        return self.run.request.generate or self.sampling.prompt_logprobs is not None

    def at(self, step: Step | None, plan: Plan | None = None) -> None:
        """Note what is being done, for the case that it fails."""
        self._step, self._plan = step, plan

    @property
    def finish_reason(self) -> str:
        """Why the answer is complete; "" if it is not."""
        reason = self.completion.finish_reason if self.completion is not None else None
        return reason.value if reason is not None else ""

    @property
    def ending(self) -> Completion:
        """How it ended; with what was used until then, if it is not complete."""
        answer = self.answer
        if self.completion is not None:
            return self.completion
        received = answer.received if answer is not None and self.run.request.generate else 0
        cached = (answer.cached_tokens if answer is not None else None) or 0
        return Completion(usage=Usage(len(self.source.encoded.token_ids), received, cached))

    def first_token(self) -> None:
        """Note that its first token was generated."""
        self._first_token = self.run.clock.now()
        self.run.first_token()

    def sent(self, piece: Piece) -> Piece:
        """Note that a piece goes to the caller."""
        self.completion = piece.completion
        if piece.token_count:
            now = self.run.clock.now()
            if self._last_text is not None:
                self.run.lane.gap(now - self._last_text)
            self._last_text = now
        if piece.completion is not None:
            self._record_pace(piece.completion)
        return piece

    def _record_pace(self, completion: Completion) -> None:
        count = completion.usage.completion_tokens if completion.usage is not None else 0
        if self._first_token is not None and count > 1:
            elapsed = self.run.clock.now() - self._first_token
            self.run.lane.per_token(elapsed / (count - 1))

    def lose_tokenizer(self, error: MeshError, attempts: int) -> None:
        """Note that where the text is made is gone; raise what it failed with after so many."""
        self.lost.append(self.tokenizer)
        if len(self.lost) >= attempts:
            raise error
        self.run.metrics.retried(Step.TOKENIZE, migrates=True)
        log.info("request %s: its tokenizer is lost, going on elsewhere", self.run.request.id)

    def retry(self, error: MeshError, attempts: int) -> None:
        """Return if a further attempt may do better; raise what failed if not.

        It begins anew, or goes on from the tokens that came before the failure.
        """
        answer, step, run = self.answer, self._step, self.run
        if step is None or self._plan is None:
            # Nobody is left to try: the reason is what the last one failed with.
            raise self._failure or error
        self._attempts += 1
        migrates = answer is not None and bool(answer.received)
        if migrates and isinstance(error, InvalidRequestError) and self._failure is not None:
            # What is wrong with going on is no fault of the caller's.
            raise self._failure
        if answer is None or not answer.open or not row(error).retry or self._attempts >= attempts:
            raise error
        self._failure = error
        self._exclude(error, step, self._plan)
        if migrates:
            self.local = True
            if self.echoed:
                self.sampling = replace(self.sampling, prompt_logprobs=None)
        run.metrics.retried(step, migrates=migrates)
        verb = "going on elsewhere" if migrates else "trying again"
        log.info("request %s: %s failed, %s: %s", run.request.id, step, verb, error.reason)

    def _exclude(self, error: MeshError, step: Step, plan: Plan) -> None:
        suspect = plan.decode
        if plan.prefill is not None and (
            step is Step.PREFILL or isinstance(error, (TicketError, TransferError))
        ):
            suspect = plan.prefill
            # The second prefill that comes to nothing is the last.
            self.local = self.local or self._attempts > 1
        self.excluded.append(suspect)
        failure = Failure(step.value, suspect.id, error.reason.value)
        run = self.run
        run.span.event(
            "retry",
            {
                "kvmesh.step": failure.step,
                "kvmesh.worker": failure.worker_id,
                "error.type": failure.reason,
            },
        )
        if run.explanation is not None:
            run.explanation.failed(self.index, failure)

    def _sampling(self, number: int) -> Sampling:
        """Return how the `number`th answer to a prompt is sampled: each from its own seed."""
        request, sampling = self.run.request, self.run.request.sampling
        seed, scores = sampling.seed, self.prompt_logprobs
        if seed is not None and number:
            seed = (seed + number + 2**63) % 2**64 - 2**63
        if self.scores_echo:
            scores = max(scores or 0, sampling.logprobs or 0)
        found = self.source.encoded.bad_words
        if (seed, scores) != (sampling.seed, sampling.prompt_logprobs) or found:
            words = (*sampling.bad_words, *found)
            sampling = replace(sampling, seed=seed, prompt_logprobs=scores, bad_words=words)
        if not request.generate:
            sampling = replace(sampling, max_tokens=1, min_tokens=0)
        return sampling
