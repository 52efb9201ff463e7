"""Who is planned at once, who waits, and for how long. Pure: time is an argument.

A request that finds no room waits in its model's line; whose turn it is there is the line's
affair (`services.router.fair`). One that finds no worker at all waits for a moment only.
Lines of different models do not hold each other up; all of them together are bounded, and
who fills them pays first.
"""

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field

from kvmesh.errors import (
    DeadlineError,
    MeshError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from services.router.fair import Excluded, Line, Waiter, parse_weights
from services.router.planner import Blocked, Decision, Planner
from services.router.policy import Demand
from services.router.state import Fleet

MAX_RETRY_AFTER_SECONDS = 60.0
"""Nobody is told to come back later than that, however long the line."""

_SPARE_ENTRIES = 64
"""So many entries more than twice the live ones the heap may have before it is swept."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Bounds of waiting. Raises ValueError where a weight has the wrong form."""

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
        default=1.0,
        metadata={"help": "when those who are turned away may retry at the earliest", "min": 0.0},
    )
    shed_margin: float = field(
        default=2.0,
        metadata={
            "help": "who would wait so many times as long as he can is refused at once; 0: nobody",
            "min": 0.0,
        },
    )
    weights: tuple[str, ...] = field(
        default=(), metadata={"help": "shares of keys that count more or less, as key=weight"}
    )

    def __post_init__(self) -> None:
        """Check the weights."""
        parse_weights(self.weights)


class Admission:
    """The lines in front of the planner."""

    def __init__(self, fleet: Fleet, planner: Planner, config: QueueConfig) -> None:
        self._fleet = fleet
        self._planner = planner
        self._config = config
        self._weights = parse_weights(config.weights)
        self._lines: dict[str, Line] = {}
        self._held: Counter[str] = Counter()
        self._waiting = 0
        self._shed: list[tuple[Waiter, MeshError]] = []
        self._arrivals = itertools.count(1)
        # When to look at whom: not after his wait is over, too early does no harm.
        self._looks: list[tuple[float, int, Waiter]] = []
        self._looks_made = itertools.count()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._waiting

    def configure(self, config: QueueConfig) -> None:
        """Go by other bounds from now on. Nobody who waits already is put out for them."""
        self._config = config
        self._weights = parse_weights(config.weights)
        self._sweep()

    def submit(self, demand: Demand, now: float, deadline: float | None) -> Decision | Waiter:
        """Plan a request, or put it in line.

        It can't overtake: whoever changes something calls `pump` or `fleet_changed` at
        once, so that where somebody waits there is no room that he could use.
        Raises `UnknownModelError`, `DeadlineError` if its time is up already,
        `UnavailableError` where nothing can serve it and waiting is switched off, and
        `OverloadedError` when its time will be up before its turn, or the lines are full.
        Where they are full it may take the place of another, whom `take_shed` returns then.
        """
        if not self._fleet.knows_model(demand.model):
            raise UnknownModelError(f"the model {demand.model!r} does not exist", field="model")
        if deadline is not None and deadline <= now:
            raise DeadlineError("the request's time was up before it could be routed")
        result = self._planner.plan(demand)
        if isinstance(result, Decision):
            return result
        return self._enqueue(demand, result, now, deadline)

    def take_shed(self) -> list[tuple[Waiter, MeshError]]:
        """Return those who lost their place to others since the last call; what to tell each."""
        shed, self._shed = self._shed, []
        return shed

    def withdraw(self, waiter: Waiter) -> None:
        """Take a request out of line. No effect if it is not in line any more."""
        if not waiter.in_line:
            return
        model, key = waiter.demand.model, waiter.demand.fair_key
        line = self._lines[model]
        line.remove(waiter)
        if not len(line):
            del self._lines[model]
        self._waiting -= 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        if len(self._looks) > 2 * self._waiting + _SPARE_ENTRIES:
            self._sweep()

    def pump(self, model: str, now: float) -> list[tuple[Waiter, Decision]]:
        """Plan those in a model's line for whom there is room now, in order.

        Stops at the first that finds none, so that nobody is overtaken; only one that
        excludes workers may be passed by, since what it can't use others can.
        """
        admitted: list[tuple[Waiter, Decision]] = []
        line = self._lines.get(model)
        if line is None:
            return admitted
        blocked: list[Excluded] = []
        while (waiter := line.choose(blocked)) is not None:
            result = self._planner.plan(waiter.demand)
            if isinstance(result, Decision):
                line.charge(waiter)
                self._leave(waiter, now)
                admitted.append((waiter, result))
            else:
                blocked.append(waiter.demand.excluded)
        if admitted:
            line.pace.served(len(admitted), now)
        return admitted

    def fleet_changed(self, now: float) -> list[tuple[Waiter, Decision]]:
        """Look at every line anew after workers came, went or changed state."""
        admitted = [pair for model in tuple(self._lines) for pair in self.pump(model, now)]
        for line in self._lines.values():
            served: dict[Excluded, bool] = {}
            for waiter in line:
                excluded = waiter.demand.excluded
                if excluded not in served:
                    served[excluded] = self._planner.has_worker(waiter.demand)
                if served[excluded]:
                    waiter.no_worker_since = None
                elif waiter.no_worker_since is None:
                    waiter.no_worker_since = now
                    self._look_at(waiter)
        return admitted

    def expire(self, now: float) -> list[tuple[Waiter, MeshError]]:
        """Take those out of line whose wait is over; each with what to tell it."""
        expired: list[tuple[Waiter, MeshError]] = []
        while (at := self.next_expiry()) is not None and at <= now:
            _, _, waiter = heapq.heappop(self._looks)
            expired.append((waiter, self._verdict(waiter, now)))
            self._leave(waiter, now)
        return expired

    def expiry(self, waiter: Waiter) -> float:
        """Return when the wait of one request is over, as things are now."""
        expiry = waiter.patience if waiter.deadline is None else waiter.deadline
        if waiter.no_worker_since is not None:
            return min(expiry, waiter.no_worker_since + self._config.wait_for_worker_seconds)
        return expiry

    def next_expiry(self) -> float | None:
        """Return when `expire` is to be called next, or None if nobody waits."""
        while self._looks:
            at, _, waiter = self._looks[0]
            if not waiter.in_line:
                heapq.heappop(self._looks)
            elif (expiry := self.expiry(waiter)) <= at:
                return at
            else:
                heapq.heapreplace(self._looks, (expiry, next(self._looks_made), waiter))
        return None

    def _enqueue(self, demand: Demand, why: Blocked, now: float, deadline: float | None) -> Waiter:
        config = self._config
        no_worker = why is Blocked.NO_WORKER
        if no_worker and config.wait_for_worker_seconds <= 0:
            raise self._no_worker(demand)
        cost = float(self._planner.tokens(demand))
        waiter = Waiter(demand, cost, now, deadline, now + config.max_seconds)
        line = self._lines.get(demand.model)
        waiter.position = 1 if line is None else line.position(demand)
        if not no_worker:
            self._refuse_hopeless(waiter)
        if self._waiting >= config.max_requests:
            self._make_room(waiter)
        line = self._lines.get(demand.model)  # who made room may have been the last in it
        if line is None:
            line = self._lines[demand.model] = Line(self._weight, now)
        waiter.arrival = next(self._arrivals)
        waiter.no_worker_since = now if no_worker else None
        line.add(waiter)
        waiter.line_length = len(line)
        self._waiting += 1
        self._held[demand.fair_key] += 1
        self._look_at(waiter)
        return waiter

    def _refuse_hopeless(self, waiter: Waiter) -> None:
        """Raise for one whose time will be up before his turn, even at a much better pace."""
        margin = self._config.shed_margin
        seconds = self._estimate(waiter.demand, waiter.position)
        if margin > 0 and seconds is not None:
            patience = self.expiry(waiter) - waiter.arrived
            if seconds > margin * patience:
                raise OverloadedError(
                    f"the wait for a worker is about {seconds:.0f} s, longer than the request has",
                    retry_after=self._retry_after(seconds),
                )

    def _make_room(self, newcomer: Waiter) -> None:
        """Take the place of one of the key that has most by its weight, or raise.

        A key that is no better off gets none, but by giving up a request of its own that
        has a worse priority.
        """
        error = OverloadedError(
            "too many requests are waiting for a worker",
            retry_after=self._retry_after(self._estimate(newcomer.demand, newcomer.position)),
        )
        held, key = self._held, newcomer.demand.fair_key
        greediest = max(held, key=lambda each: held[each] / self._weight(each), default=key)
        modest = (held[key] + 1) / self._weight(key) < held[greediest] / self._weight(greediest)
        victim = self._last_of(greediest if modest else key)
        if victim is None or not (modest or victim.demand.priority > newcomer.demand.priority):
            raise error
        self._shed.append((victim, error))
        self._leave(victim, newcomer.arrived)

    def _last_of(self, key: str) -> Waiter | None:
        """Return the newest request of a key among those of its worst priority."""
        lasts = [last for line in self._lines.values() if (last := line.last_of(key)) is not None]
        return max(lasts, key=lambda last: (last.demand.priority, last.arrival), default=None)

    def _leave(self, waiter: Waiter, now: float) -> None:
        waiter.waited = now - waiter.arrived
        self.withdraw(waiter)

    def _weight(self, key: str) -> float:
        return self._weights.get(key, 1.0)

    def _look_at(self, waiter: Waiter) -> None:
        heapq.heappush(self._looks, (self.expiry(waiter), next(self._looks_made), waiter))

    def _sweep(self) -> None:
        """Drop the entries of those who have left, and look anew at those who wait."""
        self._looks.clear()
        for line in self._lines.values():
            for waiter in line:
                self._look_at(waiter)

    def _estimate(self, demand: Demand, position: int) -> float | None:
        """Return how long the wait would be at that position; None: not known."""
        line = self._lines.get(demand.model)
        return None if line is None else line.pace.wait(position)

    def _retry_after(self, seconds: float | None) -> float:
        least = self._config.retry_after_seconds
        return least if seconds is None else max(least, min(seconds, MAX_RETRY_AFTER_SECONDS))

    def _verdict(self, waiter: Waiter, now: float) -> MeshError:
        if waiter.no_worker_since is not None and not self._is_late(waiter, now):
            return self._no_worker(waiter.demand)
        line = self._lines[waiter.demand.model]
        position = line.position(waiter.demand)
        retry_after = self._retry_after(self._estimate(waiter.demand, position))
        if self._is_late(waiter, now):
            return DeadlineError(
                "the request's time was up before a worker had room", retry_after=retry_after
            )
        return OverloadedError("no worker had room in time", retry_after=retry_after)

    @staticmethod
    def _is_late(waiter: Waiter, now: float) -> bool:
        return waiter.deadline is not None and waiter.deadline <= now

    def _no_worker(self, demand: Demand) -> UnavailableError:
        return UnavailableError(
            f"no worker can serve the model {demand.model!r} now",
            retry_after=self._config.retry_after_seconds,
        )
