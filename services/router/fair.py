"""Whose turn it is in a model's line: by priority, then fairly between keys. Pure.

Within one priority the keys are served by deficit round robin. Each round gives every key
that waits so many tokens by its weight; a key that has some left is served, in the order of
the ring, and pays what the request is estimated to cost, into debt if need be. Rounds in
which nobody could be served are skipped. So whoever has one request in line waits for about
one request of each other key, however many those have.

A key that leaves while it owes owes still when it comes back, as long as others wait: one
large request after the other is no way to get more. All steps take time by the number of
keys, not of requests.
"""

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from services.router.pace import Pace
from services.router.policy import Demand

QUANTUM = 32.0
"""Tokens that a round gives to a key of weight 1: so few that keys take turns."""

MAX_DEBTORS = 4096
"""Absent keys whose debts are remembered; of more the oldest are forgiven."""

Excluded = frozenset[str]

Weights = Callable[[str], float]
"""Returns a key's weight, above 0."""


class Waiter:
    """One request in line, and what its wait was like.

    `cost` is its estimated work in tokens. On arrival it would have been served as the
    `position`th (1: the next), in a line of `line_length`, itself included. `waited` is in
    seconds, and set when it is over.
    """

    __slots__ = (
        *("arrival", "arrived", "cost", "deadline", "demand", "in_line", "line_length"),
        *("no_worker_since", "patience", "position", "waited"),
    )

    def __init__(
        self, demand: Demand, cost: float, arrived: float, deadline: float | None, patience: float
    ) -> None:
        self.demand = demand
        self.cost = cost
        self.arrived = arrived
        self.deadline = deadline
        self.patience = patience
        self.no_worker_since: float | None = None
        self.arrival = 0
        self.position = 0
        self.line_length = 0
        self.waited = 0.0
        self.in_line = False


def parse_weights(entries: Iterable[str]) -> Mapping[str, float]:
    """Read `key=weight` entries; raises ValueError for anything else."""
    weights: dict[str, float] = {}
    for entry in entries:
        key, equals, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not equals or not 0 < weight < math.inf:
            raise ValueError(f"weights: {entry!r} is not key=weight with a weight above 0")
        weights[key] = weight
    return weights


class Line:
    """All who wait for one model, and the pace at which they are served."""

    def __init__(self, weights: Weights, now: float) -> None:
        self.pace = Pace(now)
        self._weights = weights
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return self._count

    def __iter__(self) -> Iterator[Waiter]:
        """Go through all who wait, in no order of note."""
        for level in self._levels.values():
            yield from level

    def position(self, demand: Demand) -> int:
        """Return as which of all a request that came now would be served; 1: the next."""
        priority = demand.priority
        ahead = sum(len(self._levels[each]) for each in self._priorities if each < priority)
        level = self._levels.get(priority)
        return ahead + (1 if level is None else level.position(demand.fair_key))

    def add(self, waiter: Waiter) -> None:
        """Put a request in line, behind those of its key and priority."""
        priority = waiter.demand.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(self._weights)
            insort(self._priorities, priority)
        level.add(waiter)
        waiter.in_line = True
        self._count += 1

    def remove(self, waiter: Waiter) -> None:
        """Take a request out of line, wherever it is."""
        priority = waiter.demand.priority
        level = self._levels[priority]
        level.remove(waiter)
        waiter.in_line = False
        self._count -= 1
        if not len(level):
            del self._levels[priority]
            self._priorities.remove(priority)

    def choose(self, blocked: Collection[Excluded] = ()) -> Waiter | None:
        """Return whose turn it is, None if nobody's.

        Those are passed by for whom there is no room: who exclude the same workers as one
        of `blocked`, or more. The same call again has the same answer.
        """
        for priority in self._priorities:
            waiter = self._levels[priority].choose(blocked)
            if waiter is not None:
                return waiter
        return None

    def charge(self, waiter: Waiter) -> None:
        """Let a request's key pay for it; before it is removed."""
        self._levels[waiter.demand.priority].charge(waiter)

    def last_of(self, key: str) -> Waiter | None:
        """Return the newest request of a key in its worst priority, None if it has none."""
        for priority in reversed(self._priorities):
            waiter = self._levels[priority].last_of(key)
            if waiter is not None:
                return waiter
        return None


class _Share:
    """The requests of one key and one priority, and the tokens that it may still take.

    They are kept apart by the workers that they exclude, each group in order of arrival.
    """

    __slots__ = ("_groups", "balance", "count")

    def __init__(self, balance: float) -> None:
        self.balance = balance
        self.count = 0
        self._groups: dict[Excluded, OrderedDict[Waiter, None]] = {}

    def __iter__(self) -> Iterator[Waiter]:
        for group in self._groups.values():
            yield from group

    def add(self, waiter: Waiter) -> None:
        self._groups.setdefault(waiter.demand.excluded, OrderedDict())[waiter] = None
        self.count += 1

    def remove(self, waiter: Waiter) -> None:
        excluded = waiter.demand.excluded
        group = self._groups[excluded]
        del group[waiter]
        self.count -= 1
        if not group:
            del self._groups[excluded]

    def first(self, blocked: Collection[Excluded]) -> Waiter | None:
        heads = [
            next(iter(group))
            for excluded, group in self._groups.items()
            if not any(each <= excluded for each in blocked)
        ]
        return min(heads, key=_arrival, default=None)

    def last(self) -> Waiter:
        return max((next(reversed(group)) for group in self._groups.values()), key=_arrival)


class _Level:
    """The ring of keys of one priority."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._ring: OrderedDict[str, _Share] = OrderedDict()
        self._count = 0
        self._round = 0
        self._debts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiter]:
        for share in self._ring.values():
            yield from share

    def add(self, waiter: Waiter) -> None:
        key = waiter.demand.fair_key
        share = self._ring.get(key)
        if share is None:
            # With nothing left, and last: newcomers can't keep a round from ending.
            share = self._ring[key] = _Share(self._debt(key))
        share.add(waiter)
        self._count += 1

    def remove(self, waiter: Waiter) -> None:
        key = waiter.demand.fair_key
        share = self._ring[key]
        share.remove(waiter)
        self._count -= 1
        if not share.count:
            del self._ring[key]
            if share.balance < 0:
                self._debts[key] = (share.balance, self._round)
                if len(self._debts) > MAX_DEBTORS:
                    self._debts.popitem(last=False)

    def choose(self, blocked: Collection[Excluded]) -> Waiter | None:
        waiter = self._affordable(blocked)
        if waiter is None:
            waiting = [key for key, share in self._ring.items() if share.first(blocked)]
            if waiting:
                self._next_round(waiting)
                waiter = self._affordable(blocked)
        return waiter

    def _affordable(self, blocked: Collection[Excluded]) -> Waiter | None:
        """Return the first in the ring whose key has something left."""
        for share in self._ring.values():
            if share.balance > 0 and (waiter := share.first(blocked)) is not None:
                return waiter
        return None

    def charge(self, waiter: Waiter) -> None:
        key = waiter.demand.fair_key
        share = self._ring[key]
        share.balance -= waiter.cost
        if share.balance <= 0:
            self._ring.move_to_end(key)  # whoever can afford something is soon found

    def position(self, key: str) -> int:
        """Count one's own, and of every other key as many as are served meanwhile."""
        share = self._ring.get(key)
        own = 1 if share is None else share.count + 1
        turns = own / self._weights(key)
        others = (
            min(each.count, math.ceil(turns * self._weights(name)))
            for name, each in self._ring.items()
            if name != key
        )
        return own + sum(others)

    def last_of(self, key: str) -> Waiter | None:
        share = self._ring.get(key)
        return None if share is None else share.last()

    def _next_round(self, keys: Iterable[str]) -> None:
        """Give every key as many quanta as it takes until one of `keys` has something left."""
        rounds = min(int(-self._ring[k].balance // self._quantum(k)) + 1 for k in keys)
        self._round += rounds
        for key, share in self._ring.items():
            quantum = self._quantum(key)
            # Who is passed by does not save up.
            share.balance = min(quantum, share.balance + rounds * quantum)

    def _quantum(self, key: str) -> float:
        return QUANTUM * self._weights(key)

    def _debt(self, key: str) -> float:
        balance, at_round = self._debts.pop(key, (0.0, 0))
        return min(0.0, balance + (self._round - at_round) * self._quantum(key))


def _arrival(waiter: Waiter) -> int:
    return waiter.arrival
