"""Where a request is to run: asked of a router, or chosen here when none is reachable."""

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from kvmesh.clock import Clock
from kvmesh.errors import (
    DrainingError,
    MeshError,
    UnavailableError,
    UnknownModelError,
)
from kvmesh.rpc import clients
from kvmesh.rpc.clients import PlanCall, RouteQuery
from kvmesh.rpc.peer import Peer
from kvmesh.telemetry import Span
from kvmesh.types import Plan
from services.frontend.fleet import RETRY_AFTER_SECONDS, Fleet, Model
from services.frontend.metrics import FrontendMetrics
from services.frontend.run import Choice


@dataclass(slots=True)
class Placement:
    """A plan, and what it holds for as long as the block runs."""

    plan: Plan
    _fleet: Fleet
    _call: PlanCall | None = None
    _prefilled: bool = False
    _cached_told: bool = False

    def prefilled(self, cached_tokens: int | None = None) -> None:
        """Tell the router that the prompt is computed, and how much of it had been cached.

        Each is told once; `cached_tokens` may follow as soon as it is known.
        """
        news = cached_tokens is not None and not self._cached_told
        if self._call is not None and (news or not self._prefilled):
            self._prefilled = True
            self._cached_told = self._cached_told or news
            self._call.prefilled(cached_tokens)

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
        choice.at(None)
        with run.span.child("route") as span:
            query = RouteQuery(
                model.name,
                prompt_tokens=len(encoded.token_ids),
                max_tokens=choice.sampling.max_tokens or 0,
                block_hashes=encoded.block_hashes,
                block_size=model.block_size,
                excluded=choice.excluded,
                session=run.request.session,
            )
            placement = None
            for peer in self._fleet.routers():
                placement = await self._ask(choice, peer, query, span)
                if placement is not None:
                    break
            else:
                placement = self._choose(choice, model)
            _describe(span, placement.plan)
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
            plan = replace(plan, prefill=None)
        return Placement(plan, self._fleet, call)

    def _choose(self, choice: Choice, model: Model) -> Placement:
        worker = self._fleet.least_busy(model, choice.excluded)
        self._metrics.fallbacks += 1
        plan = Plan(worker, None, expected_cached_tokens=0, why="no router: least busy here")
        return Placement(plan, self._fleet)


def _describe(span: Span, plan: Plan) -> None:
    span.set("kvmesh.decode_worker", plan.decode.id)
    if plan.prefill is not None:
        span.set("kvmesh.prefill_worker", plan.prefill.id)
    span.set("kvmesh.expected_cached_tokens", plan.expected_cached_tokens)
    span.set("kvmesh.why", plan.why)
