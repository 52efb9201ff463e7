"""The one owner of the router's state: takes requests and news, hands out decisions.

Everything here runs on the event loop, in one turn and without waiting, so there is
nothing to lock: each change is followed at once by whatever it makes possible.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from kvmesh.clock import Clock
from kvmesh.errors import MeshError
from kvmesh.types import Leg, Member, WorkerNews
from services.router.admission import Admission
from services.router.audit import NO_CLAIM, Audit
from services.router.fair import Waiter
from services.router.planner import Decision
from services.router.policy import Demand
from services.router.reservations import Ledger, Life, Reservation
from services.router.state import Applied, Fleet

Answer = Callable[[Decision | MeshError], None]
"""Gets a request's decision, or why there is none. Called once, must not block."""


class Routed:
    """One request's stay in the router, from `Dispatcher.submit` to `Dispatcher.end`."""

    __slots__ = ("answer", "claim", "decided_at", "demand", "reservation", "tokens", "waiter")

    def __init__(self, demand: Demand, answer: Answer) -> None:
        self.demand = demand
        self.answer = answer
        self.waiter: Waiter | None = None
        self.reservation: Reservation | None = None
        self.claim = NO_CLAIM
        self.tokens = 0.0
        self.decided_at = 0.0

    def decided(self, decision: Decision, now: float) -> None:
        """Take the decision, and pass it on."""
        self.waiter = None
        self.decided_at = now
        self.tokens = decision.chosen.uncached + decision.chosen.queued
        self.reservation = decision.reservation
        self.claim = decision.claim
        self.answer(decision)


class Dispatcher:
    """Admission with time and answers. An async context manager: leaving stops its timer."""

    def __init__(self, fleet: Fleet, ledger: Ledger, admission: Admission, clock: Clock) -> None:
        self.audit = Audit()
        self._fleet = fleet
        self._ledger = ledger
        self._admission = admission
        self._clock = clock
        self._waiting: dict[Waiter, Routed] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None

    async def __aenter__(self) -> Self:
        """Do nothing: there is nothing to start."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the timer. Whoever still waits is told nothing more."""
        self._set_timer(None)

    def submit(self, demand: Demand, deadline: float | None, answer: Answer) -> Routed:
        """Decide now, or as soon as there is room.

        `answer` may be called before this returns. `deadline` is on the clock. Raises as
        `Admission.submit` does, and then `answer` is not called. The caller calls `end`
        exactly when the request is over or no longer wanted, whatever was answered.
        """
        routed = Routed(demand, answer)
        result = self._admission.submit(demand, self._clock.now(), deadline)
        if isinstance(result, Decision):
            routed.decided(result, self._clock.now())
        else:
            routed.waiter = result
            self._waiting[result] = routed
            self._arm_by(self._admission.expiry(result))
            self._refuse(self._admission.take_shed())
        return routed

    def position(self, routed: Routed) -> int:
        """Return as which of its line it would have been served on arrival, the next is 1.

        0: it does not wait.
        """
        return routed.waiter.position if routed.waiter is not None else 0

    def prefilled(self, routed: Routed, cached_tokens: int | None = None) -> None:
        """Note that a planned request's prompt is computed, and how much of it was cached.

        Either may be said again: the first time counts for the one, each for the other.
        """
        reservation = routed.reservation
        if reservation is None:
            return
        computed_by = reservation.prefill or reservation.decode
        if not reservation.prefilled:
            self._ledger.prefilled(reservation)
            seconds = self._clock.now() - routed.decided_at
            self._fleet.computed(computed_by, routed.tokens, seconds)
        if cached_tokens is not None and routed.demand.block_hashes:
            self.audit.answered(
                computed_by,
                prompt_tokens=routed.demand.prompt_tokens,
                claim=routed.claim,
                cached=cached_tokens,
                block_size=routed.demand.block_size,
            )
            self._fleet.doubt(computed_by, self.audit.flagged(computed_by))

    def generating(self, routed: Routed) -> None:
        """Note that a planned request's decode worker has generated a token."""
        if routed.reservation is not None and routed.reservation.trial is not None:
            routed.reservation.trial.generating()

    def failed(self, routed: Routed, leg: Leg, *, timed_out: bool) -> None:
        """Note that a part of a planned request failed, or was not done in its time."""
        if routed.reservation is not None and routed.reservation.trial is not None:
            routed.reservation.trial.failed(leg, timed_out=timed_out)

    def end(self, routed: Routed) -> None:
        """Free all that the request holds here. A second time has no effect."""
        if routed.waiter is not None:
            self._admission.withdraw(routed.waiter)
            self._waiting.pop(routed.waiter, None)
            routed.waiter = None
        if routed.reservation is not None:
            self._ledger.release(routed.reservation)
            self._pump(routed.demand.model)

    def update_members(self, members: Iterable[Member]) -> None:
        """Take over a membership snapshot."""
        self._fleet.update(members)
        self.audit.keep({worker.life for worker in self._fleet.workers()})
        self._fleet_changed()

    def watchable(self) -> Mapping[Life, Member]:
        """Return the lives whose events are to be watched."""
        return self._fleet.watchable()

    def apply(self, life: Life, news: WorkerNews) -> Applied:
        """Take over one message of a worker's event stream; see `Fleet.apply`."""
        applied = self._fleet.apply(life, news)
        worker = self._fleet.find(life)
        if applied is Applied.OK and news.sequence == 1:
            self._fleet_changed()
        elif applied is Applied.OK and worker is not None:
            self._pump(worker.member.model)
        return applied

    def suspect(self, life: Life) -> None:
        """Take a worker out of routing: its event stream broke."""
        self._fleet.suspect(life)
        self._fleet_changed()

    def settings_changed(self) -> None:
        """Look at all who wait anew: there may be room for more now, or less time."""
        self._fleet_changed()

    def _fleet_changed(self) -> None:
        if self._waiting:
            self._deliver(self._admission.fleet_changed(self._clock.now()))
            self._arm_by(self._admission.next_expiry())

    def _pump(self, model: str) -> None:
        if self._waiting:
            self._deliver(self._admission.pump(model, self._clock.now()))

    def _deliver(self, admitted: Sequence[tuple[Waiter, Decision]]) -> None:
        for waiter, decision in admitted:
            routed = self._waiting.pop(waiter)
            routed.decided(decision, self._clock.now())

    def _refuse(self, refused: Sequence[tuple[Waiter, MeshError]]) -> None:
        for waiter, error in refused:
            routed = self._waiting.pop(waiter)
            routed.waiter = None
            routed.answer(error)

    def _arm_by(self, at: float | None) -> None:
        """See to it that `_expire` runs by then; too early does no harm."""
        if at is not None and (self._timer_at is None or at < self._timer_at):
            self._set_timer(at)

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at is not None:
            delay = max(0.0, at - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._set_timer(None)
        self._refuse(self._admission.expire(self._clock.now()))
        self._arm_by(self._admission.next_expiry())
