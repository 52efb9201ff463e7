"""Where a request is to run: asked of a router, or chosen here when none is reachable."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvmesh.clock import Clock
from kvmesh.errors import (
    DeadlineError,
    DrainingError,
    MeshError,
    Reason,
    TicketError,
    TransferError,
    UnavailableError,
    UnknownModelError,
)
from kvmesh.rpc import clients
from kvmesh.rpc.clients import PlanCall, RouteQuery
from kvmesh.rpc.peer import Peer
from kvmesh.telemetry import Span
from kvmesh.types import Leg, Plan
from services.frontend.explanation import (
    MIGRATED,
    NO_ROUTER,
    PREFILL_FAILED,
    PROMPT_LOGPROBS,
    kept_local,
)
from services.frontend.fleet import RETRY_AFTER_SECONDS, Fleet, Model
from services.frontend.metrics import FrontendMetrics
from services.frontend.run import Choice

FAULTS = frozenset({Reason.ENGINE_FAILED, Reason.INTERNAL, Reason.PROTOCOL, Reason.UNAVAILABLE})
"""Reasons that are a worker's fault, whatever it was asked; of a hand-off there are others."""


@dataclass(slots=True)
class Placement:
    """A plan, and what it holds for as long as the block runs."""

    plan: Plan
    _fleet: Fleet
    _call: PlanCall | None = None
    router_id: str = ""
    """Who decided; empty: no router did."""
    _prefilled: bool = False
    _cached_told: bool = False
    _generating: bool = False
    _failed: bool = False

    def prefilled(self, cached_tokens: int | None = None) -> None:
        """Tell the router that the prompt is computed, and how much of it had been cached.

        Each is told once; `cached_tokens` may follow as soon as it is known.
        """
        news = cached_tokens is not None and not self._cached_told
        if self._call is not None and (news or not self._prefilled):
            self._prefilled = True
            self._cached_told = self._cached_told or news
            self._call.prefilled(cached_tokens)

    def generating(self) -> None:
        """Tell the router that decode has generated a token. Later calls say nothing.

        Nor does the first where prefill was left out of the plan: it has shown nothing.
        """
        as_planned = self.plan.reason not in (MIGRATED, PREFILL_FAILED, PROMPT_LOGPROBS)
        if self._call is not None and not self._generating and as_planned:
            self._call.generating()
        self._generating = True

    def failed(self, error: MeshError) -> None:
        """Tell the router which part of the plan failed first, if that is a worker's fault."""
        late = isinstance(error, DeadlineError) and not self._generating
        handoff = isinstance(error, (TicketError, TransferError))
        if self._call is None or self._failed or not (late or handoff or error.reason in FAULTS):
            return
        self._failed = True
        self._call.failed(Leg.HANDOFF if handoff else self._leg, timed_out=late)

    @property
    def _leg(self) -> Leg:
        return Leg.PREFILL if self.plan.prefill and not self._prefilled else Leg.DECODE

    def __enter__(self) -> Self:
        self._fleet.decoding[self.plan.decode.id] += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        decoding, worker = self._fleet.decoding, self.plan.decode.id
        decoding[worker] -= 1
        if not decoding[worker]:
            del decoding[worker]
        if isinstance(error, MeshError) and (
            self._leg is Leg.PREFILL or isinstance(error, DeadlineError)
        ):
            # Decode's failures are told by who hears of them: the text may have failed, too.
            self.failed(error)
        if self._call is not None:
            self._call.leave()


class Placer:
    """Makes placements."""

    def __init__(self, fleet: Fleet, metrics: FrontendMetrics, clock: Clock) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock

    async def place(self, choice: Choice, model: Model) -> Placement:
        """Return a placement, to be entered at once.

        Raises what a router refuses the request with. Routers that can't be reached
        are passed over; without any, the least busy decode worker does it all.
        """
        run, encoded = choice.run, choice.source.encoded
        generated = choice.answer.received if choice.answer is not None else 0
        choice.at(None)
        with run.span.child("route") as span:
            query = RouteQuery(
                model.name,
                prompt_tokens=len(encoded.token_ids) + generated,
                max_tokens=max(0, (choice.sampling.max_tokens or 0) - generated),
                block_hashes=encoded.block_hashes,
                block_size=model.block_size,
                excluded=self._fleet.same_lives(choice.excluded),
                session=run.request.session,
                fair_key=run.request.fair_key,
            )
            placement = None
            for peer in self._fleet.routers():
                placement = await self._ask(choice, peer, query, span)
                if placement is not None:
                    break
            else:
                placement = self._choose(choice, model)
            plan, router_id = placement.plan, placement.router_id
            _describe(span, plan, router_id)
            if run.explanation is not None:
                run.explanation.placed(choice.index, plan, router_id, query.prompt_tokens)
            return placement

    async def _ask(
        self, choice: Choice, router: Peer, query: RouteQuery, span: Span
    ) -> Placement | None:
        """Return the router's plan; None if it can't be reached or takes no requests."""
        run = choice.run
        try:
            call = clients.route(router, query, run.context(span), self._clock)
        except UnavailableError:
            return None
        try:
            plan = await run.within(call.value)
        except BaseException as error:
            call.leave()
            if isinstance(error, DrainingError) or (
                isinstance(error, MeshError) and call.stream.broken is not None
            ):
                return None
            if isinstance(error, UnknownModelError):
                # It is there, as we know: the router has not heard of it yet.
                raise UnavailableError(error.message, retry_after=RETRY_AFTER_SECONDS) from error
            raise
        if choice.local:
            plan = kept_local(plan, _why_local(choice))
        return Placement(plan, self._fleet, call, router.worker.id)

    def _choose(self, choice: Choice, model: Model) -> Placement:
        worker = self._fleet.least_busy(model, self._fleet.same_lives(choice.excluded))
        self._metrics.fallbacks += 1
        plan = Plan(
            worker,
            None,
            expected_cached_tokens=0,
            why="no router: least busy here",
            policy="least_busy",
            reason=NO_ROUTER,
        )
        return Placement(plan, self._fleet)


def _why_local(choice: Choice) -> str:
    if choice.answer is not None and choice.answer.received:
        return MIGRATED
    asked = choice.sampling.prompt_logprobs is not None
    return PROMPT_LOGPROBS if asked else PREFILL_FAILED


def _describe(span: Span, plan: Plan, router_id: str) -> None:
    span.set("kvmesh.decode_worker", plan.decode.id)
    if plan.prefill is not None:
        span.set("kvmesh.prefill_worker", plan.prefill.id)
    if router_id:
        span.set("kvmesh.router", router_id)
    span.set("kvmesh.policy", plan.policy)
    span.set("kvmesh.reason", plan.reason)
    span.set("kvmesh.queue_seconds", plan.waited)
    span.set("kvmesh.expected_cached_tokens", plan.expected_cached_tokens)
    span.set("kvmesh.why", plan.why)
