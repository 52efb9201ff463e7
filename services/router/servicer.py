"""`RouterService` on the wire: starts, progress and cancels in, plans and ends out."""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc.aio

from kvmesh.clock import Clock
from kvmesh.errors import CancelledByCallerError, InvalidRequestError, MeshError
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.serving import Identity, ServerCall, ServerStream
from kvmesh.rpc.specs import ROUTE
from kvmesh.telemetry import Span, Tracer
from kvmesh.types import Context
from kvmesh.v1 import router_pb2, router_pb2_grpc
from kvmesh.wire import plan_to_proto
from services.router.dispatcher import Dispatcher, Routed
from services.router.metrics import RouterMetrics
from services.router.planner import Decision
from services.router.policy import Candidate, Demand

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name

SHOWN_CANDIDATES = 8
"""Candidates that a span tells of: the best ones."""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves Route streams from one dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        tracer: Tracer,
        *,
        identity: Identity,
        gate: Gate,
        clock: Clock,
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tracer = tracer
        self._identity = identity
        self._gate = gate
        self._clock = clock

    async def Route(
        self,
        request_iterator: AsyncIterator[router_pb2.RouteRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve one stream; see `RouterService.Route` in the proto."""
        session = _Session(self._dispatcher, self._metrics, self._tracer, self._clock)
        stream = ServerStream(
            ROUTE,
            session.start,
            identity=self._identity,
            gate=self._gate,
            clock=self._clock,
            feed=session.feed,
        )
        await stream.run(request_iterator, context)


def registration(servicer: RouterServicer) -> Callable[[grpc.aio.Server], None]:
    """Return what adds the servicer to a server."""
    return partial(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer)


class _Session:
    """The requests of one Route stream."""

    def __init__(
        self, dispatcher: Dispatcher, metrics: RouterMetrics, tracer: Tracer, clock: Clock
    ) -> None:
        self._clock = clock
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tracer = tracer
        self._routed: dict[int, Routed] = {}

    def start(self, message: router_pb2.RouteStart, call: ServerCall) -> None:
        """Plan a request now or when there is room."""
        span = self._tracer.span(
            "route",
            call.context.traceparent,
            {"kvmesh.prompt_tokens": message.prompt_tokens},
        )
        try:
            demand = _demand(message, call.context)
            answer = partial(self._answer, call, span, message.model, self._clock.now())
            routed = self._dispatcher.submit(demand, call.context.deadline, answer)
        except BaseException as error:
            if isinstance(error, MeshError):
                self._metrics.refused(error)
            span.end(error)
            raise
        self._routed[call.stream_id] = routed
        call.on_cancel = partial(self._over, call.stream_id, span)

    def feed(self, message: router_pb2.RouteRequest, _: ServerStream[Any, Any]) -> None:
        """Take note of progress; that of unknown or ended requests is ignored."""
        for progress in message.progress:
            routed = self._routed.get(progress.stream_id)
            if routed is not None and progress.prefilled:
                known = progress.HasField("cached_tokens")
                self._dispatcher.prefilled(routed, progress.cached_tokens if known else None)

    def _answer(
        self,
        call: ServerCall,
        span: Span,
        model: str,
        arrived: float,
        result: Decision | MeshError,
    ) -> None:
        if isinstance(result, MeshError):
            self._routed.pop(call.stream_id, None)
            self._metrics.refused(result)
            span.end(result)
            call.fail(result)
            return
        entry = call.outbox.next().plans.add(stream_id=call.stream_id)
        plan_to_proto(result.plan, entry)
        span.set("gen_ai.request.model", model)
        self._metrics.decided(result, model, self._clock.now() - arrived)
        _describe(span, result)
        span.end()

    def _over(self, stream_id: int, span: Span) -> None:
        self._dispatcher.end(self._routed.pop(stream_id))
        span.end(CancelledByCallerError("cancelled before there was a plan"))


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
    )


def _describe(span: Span, decision: Decision) -> None:
    plan = decision.plan
    span.set("kvmesh.policy", decision.policy)
    span.set("kvmesh.decode_worker", plan.decode.id)
    span.set("kvmesh.expected_cached_tokens", plan.expected_cached_tokens)
    span.set("kvmesh.why", plan.why)
    _describe_candidates(span, "decode", decision.decode_candidates, decision.decode_scores)
    if plan.prefill is not None:
        span.set("kvmesh.prefill_worker", plan.prefill.id)
        _describe_candidates(span, "prefill", decision.prefill_candidates, decision.prefill_scores)


def _describe_candidates(
    span: Span, role: str, candidates: Sequence[Candidate], scores: Sequence[float]
) -> None:
    """Show the best few."""
    ranked = sorted(range(len(scores)), key=scores.__getitem__)[:SHOWN_CANDIDATES]
    span.set(f"kvmesh.{role}_candidates", [candidates[at].id for at in ranked])
    span.set(f"kvmesh.{role}_scores", [float(scores[at]) for at in ranked])
