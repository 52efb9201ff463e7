"""The state of one request while it is served, and what is told of it."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from kvmesh.clock import Clock
from kvmesh.errors import DeadlineError, InternalError, MeshError, TicketError, TransferError
from kvmesh.rpc.status import row
from kvmesh.telemetry import Span
from kvmesh.types import Context, Plan, Worker
from services.frontend.answer import Answer
from services.frontend.metrics import FrontendMetrics, Outcome, Step
from services.frontend.request import Request

log = logging.getLogger(__name__)

T = TypeVar("T")


class Run:
    """One request being served: its time, its span, its attempts."""

    def __init__(
        self, request: Request, span: Span, metrics: FrontendMetrics, clock: Clock
    ) -> None:
        self.request = request
        self.span = span
        self.excluded: list[str] = []
        """Workers, by id, that failed this request."""
        self.local = False
        """Whether decode is to prefill by itself, whatever the plan says."""
        self.answer: Answer | None = None
        self._metrics = metrics
        self._clock = clock
        self._started = clock.now()
        self._last_text: float | None = None
        self._attempts = 0
        self._step: Step | None = None
        self._plan: Plan | None = None
        self._failure: MeshError | None = None

    @property
    def seconds_left(self) -> float:
        """Time until the request's deadline; may be negative."""
        return self.request.deadline - self._clock.now()

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

    def at(self, step: Step | None, plan: Plan | None = None) -> None:
        """Note what is being done, for the case that it fails."""
        self._step, self._plan = step, plan

    def retry(self, error: MeshError, attempts: int) -> None:
        """Return if a further attempt may do better; raise what failed if not.

        Nothing that the caller has seen a part of is begun anew.
        """
        answer, step = self.answer, self._step
        if step is None or self._plan is None:
            # Nobody is left to try: the reason is what the last one failed with.
            raise self._failure or error
        self._attempts += 1
        if (
            answer is None
            or answer.received
            or not answer.open
            or not row(error).retry
            or self._attempts >= attempts
        ):
            raise error
        self._failure = error
        self._exclude(error, step, self._plan)
        self._metrics.retried(step)
        self.span.event("retry", {"kvmesh.step": step.value, "error.type": error.reason.value})
        log.info("request %s: %s failed, trying again: %s", self.request.id, step, error)

    def first_token(self) -> None:
        """Note that the first token was generated."""
        self.span.event("first_token")
        self._metrics.first_token(self._clock.now() - self._started)

    def text_sent(self) -> None:
        """Note that text goes to the caller."""
        now = self._clock.now()
        if self._last_text is not None:
            self._metrics.gap(now - self._last_text)
        self._last_text = now

    def end(self, error: BaseException | None) -> None:
        """Record how the request ended."""
        answer = self.answer
        if answer is not None:
            self._metrics.completion_tokens += answer.received
        if answer is not None and answer.completion is not None:
            self._complete(answer)
        elif isinstance(error, MeshError):
            self._metrics.refused(error.reason)
            log.info("request %s: %s: %s", self.request.id, error.reason, error)
        elif error is None or not isinstance(error, Exception):
            self._metrics.ended(Outcome.CANCELLED)
        else:
            self._metrics.refused(InternalError.reason)

    def _complete(self, answer: Answer) -> None:
        self._metrics.ended(Outcome.OK)
        self._metrics.duration(self._clock.now() - self._started)
        completion = answer.completion
        if completion is None or completion.usage is None:
            return
        span, usage = self.span, completion.usage
        span.set("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set("kvmesh.cached_tokens", usage.cached_tokens)
        if completion.finish_reason is not None:
            span.set("gen_ai.response.finish_reasons", [completion.finish_reason.value])

    def _exclude(self, error: MeshError, step: Step, plan: Plan) -> None:
        suspect: Worker | None = plan.decode
        if plan.prefill is not None and (
            step is Step.PREFILL or isinstance(error, (TicketError, TransferError))
        ):
            suspect = plan.prefill
            # The second prefill that comes to nothing is the last.
            self.local = self._attempts > 1
        if suspect is not None:
            self.excluded.append(suspect.id)
