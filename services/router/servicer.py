"""`RouterService` on the wire: starts, progress and cancels in, plans and ends out; decisions."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import grpc.aio

from kvmesh.clock import Clock
from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    InvalidRequestError,
    MeshError,
)
from kvmesh.host.process import Process
from kvmesh.rpc.serving import ServerCall, ServerStream
from kvmesh.rpc.specs import ROUTE
from kvmesh.telemetry import Span
from kvmesh.types import Context
from kvmesh.v1 import router_pb2, router_pb2_grpc
from kvmesh.wire import LEG_FROM_PROTO, plan_to_proto
from services.router.decisions import DecisionLog, Entry, Filter, Outcome, Scored, best
from services.router.dispatcher import Dispatcher, Routed
from services.router.metrics import RouterMetrics
from services.router.planner import Decision
from services.router.policy import Demand

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name

SHOWN_CANDIDATES = 8
"""Candidates that a span tells of: the best ones."""

MESSAGE_DECISIONS = 64
"""Decisions in one message at most: some 64 KB."""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves Route streams from one dispatcher, and tells of its decisions."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        decisions: DecisionLog,
        metrics: RouterMetrics,
        process: Process,
    ) -> None:
        self._dispatcher = dispatcher
        self._decisions = decisions
        self._metrics = metrics
        self._process = process

    async def Route(
        self,
        request_iterator: AsyncIterator[router_pb2.RouteRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one stream; see `RouterService.Route` in the proto."""
        process = self._process
        session = _Session(self._dispatcher, self._decisions, self._metrics, process)
        stream = ServerStream(
            ROUTE,
            session.start,
            identity=process.identity,
            gate=process.gate,
            clock=process.clock,
            feed=session.feed,
        )
        await stream.run(request_iterator, context)

    async def WatchDecisions(self, request: router_pb2.WatchDecisionsRequest, context: Any) -> None:
        """Tell of decisions; see `RouterService.WatchDecisions` in the proto."""
        wanted = _filter(request)
        log = self._decisions
        with log.follow(wanted) if request.follow else nullcontext() as follower:
            # Nothing is awaited in between: what is not remembered here is followed.
            recent = log.recent(wanted, request.limit if request.HasField("limit") else None)
            for at in range(0, len(recent), MESSAGE_DECISIONS):
                await context.write(_response(recent[at : at + MESSAGE_DECISIONS]))
            while follower is not None:
                dropped, entries = await follower.next(MESSAGE_DECISIONS)
                await context.write(_response(entries, dropped))


def registration(servicer: RouterServicer) -> Callable[[grpc.aio.Server], None]:
    """Return what adds the servicer to a server."""
    return partial(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer)


class _Asked:
    """One request on a Route stream."""

    __slots__ = ("arrived", "demand", "entry", "position", "routed", "span")

    def __init__(self, demand: Demand, span: Span, arrived: float) -> None:
        self.demand = demand
        self.span = span
        self.arrived = arrived
        self.position = 0
        """Its place in the queue when it came; 0: it did not wait."""
        self.routed: Routed | None = None
        self.entry: Entry | None = None
        """Its decision, once there is one."""


class _Session:
    """The requests of one Route stream."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        decisions: DecisionLog,
        metrics: RouterMetrics,
        process: Process,
    ) -> None:
        self._clock: Clock = process.clock
        self._dispatcher = dispatcher
        self._decisions = decisions
        self._metrics = metrics
        self._tracer = process.telemetry.tracer
        self._asked: dict[int, _Asked] = {}

    def start(self, message: router_pb2.RouteStart, call: ServerCall) -> None:
        """Plan a request now or when there is room."""
        span = self._tracer.span(
            "route",
            call.context.traceparent,
            {"kvmesh.prompt_tokens": message.prompt_tokens},
        )
        try:
            demand = _demand(message, call.context)
            asked = _Asked(demand, span, self._clock.now())
            answer = partial(self._answer, call, asked)
            asked.routed = self._submit(asked, call.context.deadline, answer)
        except BaseException as error:
            span.end(error)
            raise
        self._asked[call.stream_id] = asked
        call.on_cancel = partial(self._over, call)

    def feed(self, message: router_pb2.RouteRequest, _: ServerStream[Any, Any]) -> None:
        """Take note of progress; that of unknown or ended requests is ignored."""
        for progress in message.progress:
            asked = self._asked.get(progress.stream_id)
            if asked is None or asked.routed is None:
                continue
            if progress.generating:
                self._dispatcher.generating(asked.routed)
            leg = LEG_FROM_PROTO.get(progress.failed_leg)
            if leg is not None:
                self._dispatcher.failed(asked.routed, leg, timed_out=progress.timed_out)
            if not progress.prefilled:
                continue
            cached = progress.cached_tokens if progress.HasField("cached_tokens") else None
            self._dispatcher.prefilled(asked.routed, cached)
            if cached is not None and asked.entry is not None:
                asked.entry.cached_tokens = cached

    def _submit(
        self, asked: _Asked, deadline: float | None, answer: Callable[[Decision | MeshError], None]
    ) -> Routed:
        try:
            routed = self._dispatcher.submit(asked.demand, deadline, answer)
        except MeshError as error:
            self._refused(asked, error)
            raise
        asked.position = self._dispatcher.position(routed)
        if asked.position:
            asked.span.set("kvmesh.queue_position", asked.position)
        return routed

    def _answer(self, call: ServerCall, asked: _Asked, result: Decision | MeshError) -> None:
        if isinstance(result, MeshError):
            self._asked.pop(call.stream_id, None)
            self._refused(asked, result)
            asked.span.end(result)
            call.fail(result)
            return
        # Its client ends it, also at the deadline, and tells before what it came to.
        call.disarm()
        took, waited = self._clock.now() - asked.arrived, self._waited(asked)
        entry = call.outbox.next().plans.add(stream_id=call.stream_id)
        plan_to_proto(result.plan, entry)
        entry.waited_seconds = waited
        asked.entry = self._decisions.decided(asked.demand, result, waited, asked.position)
        self._metrics.decided(result, asked.demand.model, took)
        _describe(asked.span, asked.demand, result, waited)
        asked.span.end()

    def _over(self, call: ServerCall) -> None:
        asked = self._asked.pop(call.stream_id)
        assert asked.routed is not None
        self._dispatcher.end(asked.routed)
        if asked.entry is None:
            deadline = call.context.deadline
            error: MeshError = CancelledByCallerError("cancelled before there was a plan")
            if deadline is not None and deadline <= self._clock.now():
                error = DeadlineError("the request's time was up before there was a plan")
            self._refused(asked, error)
            asked.span.end(error)

    def _refused(self, asked: _Asked, error: MeshError) -> None:
        self._metrics.refused(error)
        waited = self._waited(asked)
        self._decisions.refused(asked.demand, error, waited, asked.position)
        asked.span.set("kvmesh.queue_seconds", waited)

    def _waited(self, asked: _Asked) -> float:
        """Return the seconds in the queue: none for what was never in it."""
        return self._clock.now() - asked.arrived if asked.position else 0.0


def _demand(message: router_pb2.RouteStart, context: Context) -> Demand:
    if not message.model:
        raise InvalidRequestError("a model is required", field="model")
    if not message.prompt_tokens:
        raise InvalidRequestError("prompt_tokens must be at least 1", field="prompt_tokens")
    return Demand(
        request_id=context.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        block_hashes=tuple(message.block_hashes),
        block_size=message.block_size,
        excluded=frozenset(message.excluded_worker_ids),
        priority=context.priority,
        session=message.session_key,
        fair_key=message.fair_key,
    )


def _describe(span: Span, demand: Demand, decision: Decision, waited: float) -> None:
    if not span.recording:
        return
    plan = decision.plan
    span.set("gen_ai.request.model", demand.model)
    span.set("kvmesh.policy", decision.policy)
    span.set("kvmesh.decode_worker", plan.decode.id)
    span.set("kvmesh.expected_cached_tokens", plan.expected_cached_tokens)
    span.set("kvmesh.prefill_kind", "local" if plan.prefill is None else "remote")
    span.set("kvmesh.reason", plan.reason)
    span.set("kvmesh.why", plan.why)
    span.set("kvmesh.queue_seconds", waited)
    decode = best(decision.decode_candidates, decision.decode_scores, SHOWN_CANDIDATES)
    _describe_candidates(span, "decode", decode)
    if plan.prefill is not None:
        span.set("kvmesh.prefill_worker", plan.prefill.id)
    if len(decision.prefill_scores):
        prefill = best(decision.prefill_candidates, decision.prefill_scores, SHOWN_CANDIDATES)
        _describe_candidates(span, "prefill", prefill)


def _describe_candidates(span: Span, role: str, candidates: Sequence[Scored]) -> None:
    span.set(f"kvmesh.{role}_candidates", [one.worker_id for one in candidates])
    span.set(f"kvmesh.{role}_scores", [one.score for one in candidates])
    span.set(f"kvmesh.{role}_cached_tokens", [one.cached_tokens for one in candidates])


_OUTCOMES = {
    Outcome.REMOTE: router_pb2.DECISION_OUTCOME_REMOTE,
    Outcome.LOCAL: router_pb2.DECISION_OUTCOME_LOCAL,
    Outcome.REFUSED: router_pb2.DECISION_OUTCOME_REFUSED,
    Outcome.CANCELLED: router_pb2.DECISION_OUTCOME_CANCELLED,
}

_OUTCOMES_ASKED = {value: outcome for outcome, value in _OUTCOMES.items()}


def _filter(request: router_pb2.WatchDecisionsRequest) -> Filter:
    outcomes = frozenset(_OUTCOMES_ASKED[o] for o in request.outcomes if o in _OUTCOMES_ASKED)
    if len(outcomes) < len(set(request.outcomes)):
        raise InvalidRequestError("an outcome is unspecified or unknown", field="outcomes")
    return Filter(request.model, request.worker_id, request.policy, request.request_id, outcomes)


def _response(entries: Sequence[Entry], dropped: int = 0) -> router_pb2.WatchDecisionsResponse:
    response = router_pb2.WatchDecisionsResponse(dropped=dropped)
    for entry in entries:
        _to_proto(entry, response.decisions.add())
    return response


def _to_proto(entry: Entry, out: router_pb2.RoutingDecision) -> None:
    out.number = entry.number
    out.decide_time.FromNanoseconds(round(entry.time * 1e9))
    out.request_id = entry.request_id
    out.model = entry.model
    out.outcome = _OUTCOMES[entry.outcome]
    out.reason = entry.reason
    out.policy = entry.policy
    out.decode_worker_id = entry.decode
    out.prefill_worker_id = entry.prefill
    out.prompt_tokens = entry.prompt_tokens
    out.expected_cached_tokens = entry.expected_tokens
    if entry.cached_tokens is not None:
        out.cached_tokens = entry.cached_tokens
    out.waited_seconds = entry.waited
    out.queue_position = entry.position
    out.excluded_worker_ids.extend(entry.excluded)
    for candidates, added in (
        (entry.decode_candidates, out.decode_candidates),
        (entry.prefill_candidates, out.prefill_candidates),
    ):
        for one in candidates:
            added.add(**one._asdict())
