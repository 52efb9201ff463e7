"""Who is planned at once, who waits, and for how long. Pure: time is an argument.

A request that finds no room waits in its model's line, by priority, then by arrival.
One that finds no worker at all waits for a moment only. Lines of different models do
not hold each other up; all of them together are bounded.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from kvmesh.errors import (
    DeadlineError,
    MeshError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from services.router.planner import Blocked, Decision, Planner
from services.router.policy import Demand
from services.router.state import Fleet


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Bounds of waiting."""

    max_requests: int = field(
        default=1024, metadata={"help": "requests waiting for room at most", "min": 0}
    )
    max_seconds: float = field(
        default=60.0,
        metadata={"help": "longest wait of requests that have no deadline", "min": 0.0},
    )
    wait_for_worker_seconds: float = field(
        default=2.0, metadata={"help": "wait while a model has no worker at all", "min": 0.0}
    )
    retry_after_seconds: float = field(
        default=1.0, metadata={"help": "when those who are turned away may retry", "min": 0.0}
    )


class Waiter:
    """One request in line."""

    __slots__ = ("deadline", "demand", "no_worker_since", "order", "patience")

    def __init__(
        self, demand: Demand, order: tuple[int, int], deadline: float | None, patience: float
    ) -> None:
        self.demand = demand
        self.order = order
        self.deadline = deadline
        self.patience = patience
        self.no_worker_since: float | None = None


class Admission:
    """The lines in front of the planner."""

    def __init__(self, fleet: Fleet, planner: Planner, config: QueueConfig) -> None:
        self._fleet = fleet
        self._planner = planner
        self._config = config
        self._lines: dict[str, list[Waiter]] = {}
        self._waiting = 0
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._waiting

    def submit(self, demand: Demand, now: float, deadline: float | None) -> Decision | Waiter:
        """Plan a request, or put it in line.

        It can't overtake: whoever changes something calls `pump` or `fleet_changed` at
        once, so that where somebody waits there is no room that he could use.
        Raises `UnknownModelError`, `DeadlineError` if its time is up already,
        `UnavailableError` where nothing can serve it and waiting is switched off, and
        `OverloadedError` when the lines are full.
        """
        if not self._fleet.knows_model(demand.model):
            raise UnknownModelError(f"the model {demand.model!r} does not exist", field="model")
        if deadline is not None and deadline <= now:
            raise DeadlineError("the request's time was up before it could be routed")
        result = self._planner.plan(demand)
        if isinstance(result, Decision):
            return result
        return self._enqueue(demand, result, now, deadline)

    def withdraw(self, waiter: Waiter) -> None:
        """Take a request out of line. No effect if it is not in line any more."""
        line = self._lines.get(waiter.demand.model, [])
        index = bisect_left(line, waiter.order, key=_order)
        if index < len(line) and line[index] is waiter:
            del line[index]
            self._waiting -= 1
            if not line:
                del self._lines[waiter.demand.model]

    def pump(self, model: str) -> list[tuple[Waiter, Decision]]:
        """Plan those in a model's line for whom there is room now, in order.

        Stops at the first that finds none, so that nobody is overtaken; only one that
        excludes workers may be passed by, since what it can't use others can.
        """
        admitted: list[tuple[Waiter, Decision]] = []
        for waiter in tuple(self._lines.get(model, ())):
            result = self._planner.plan(waiter.demand)
            if isinstance(result, Decision):
                self.withdraw(waiter)
                admitted.append((waiter, result))
            elif not waiter.demand.excluded:
                break
        return admitted

    def fleet_changed(self, now: float) -> list[tuple[Waiter, Decision]]:
        """Look at every line anew after workers came, went or changed state."""
        admitted = [pair for model in tuple(self._lines) for pair in self.pump(model)]
        for line in self._lines.values():
            for waiter in line:
                self._note_workers(waiter, now)
        return admitted

    def expire(self, now: float) -> list[tuple[Waiter, MeshError]]:
        """Take those out of line whose wait is over; each with what to tell it."""
        expired = [
            (waiter, self._verdict(waiter, now))
            for line in self._lines.values()
            for waiter in line
            if self.expiry(waiter) <= now
        ]
        for waiter, _ in expired:
            self.withdraw(waiter)
        return expired

    def expiry(self, waiter: Waiter) -> float:
        """Return when the wait of one request is over, as things are now."""
        expiry = waiter.patience if waiter.deadline is None else waiter.deadline
        if waiter.no_worker_since is not None:
            return min(expiry, waiter.no_worker_since + self._config.wait_for_worker_seconds)
        return expiry

    def next_expiry(self) -> float | None:
        """Return when `expire` is to be called next, or None if nobody waits."""
        return min((self.expiry(w) for line in self._lines.values() for w in line), default=None)

    def _enqueue(self, demand: Demand, why: Blocked, now: float, deadline: float | None) -> Waiter:
        config = self._config
        no_worker = why is Blocked.NO_WORKER
        if no_worker and config.wait_for_worker_seconds <= 0:
            raise self._no_worker(demand)
        if self._waiting >= config.max_requests:
            raise OverloadedError(
                "too many requests are waiting for a worker",
                retry_after=config.retry_after_seconds,
            )
        self._arrivals += 1
        order = (demand.priority, self._arrivals)
        waiter = Waiter(demand, order, deadline, now + config.max_seconds)
        waiter.no_worker_since = now if no_worker else None
        insort(self._lines.setdefault(demand.model, []), waiter, key=_order)
        self._waiting += 1
        return waiter

    def _note_workers(self, waiter: Waiter, now: float) -> None:
        if self._planner.has_worker(waiter.demand):
            waiter.no_worker_since = None
        elif waiter.no_worker_since is None:
            waiter.no_worker_since = now

    def _verdict(self, waiter: Waiter, now: float) -> MeshError:
        retry_after = self._config.retry_after_seconds
        if waiter.deadline is not None and waiter.deadline <= now:
            return DeadlineError(
                "the request's time was up before a worker had room", retry_after=retry_after
            )
        if waiter.no_worker_since is not None:
            return self._no_worker(waiter.demand)
        return OverloadedError("no worker had room in time", retry_after=retry_after)

    def _no_worker(self, demand: Demand) -> UnavailableError:
        return UnavailableError(
            f"no worker can serve the model {demand.model!r} now",
            retry_after=self._config.retry_after_seconds,
        )


def _order(waiter: Waiter) -> tuple[int, int]:
    return waiter.order
