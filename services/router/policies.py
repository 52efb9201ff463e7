"""The policies that come with the router. Pure."""

import random
from collections.abc import Callable, Mapping, Sequence

from xxhash import xxh3_64_intdigest

from services.router.candidates import works_of
from services.router.cost import CostConfig, placement_seconds
from services.router.policy import Candidate, Demand, LowestScore, Policy

SESSION_SLACK = 1.25
"""How many times the mean of requests a worker may have and still be given its sessions."""

SESSION_FLOOR = 4
"""So many requests more it may have anyhow: few requests are never even."""


class KvAware(LowestScore):
    """The worker on which the request costs the least time, all told.

    What is cached there need not be computed, which draws requests with a common prefix
    to one worker, until waiting there costs more than computing it elsewhere.
    """

    def score(
        self, candidates: Sequence[Candidate], demand: Demand, costs: CostConfig
    ) -> Sequence[float]:
        """Return the seconds that the request costs on each."""
        return placement_seconds(works_of(candidates), costs)


class LeastLoaded(LowestScore):
    """The worker with the fewest blocks of load."""

    def score(
        self, candidates: Sequence[Candidate], demand: Demand, costs: CostConfig
    ) -> Sequence[float]:
        """Return the load of each in blocks."""
        return [c.load_blocks for c in candidates]


class Random:
    """Any worker, with equal chances."""

    def score(
        self, candidates: Sequence[Candidate], demand: Demand, costs: CostConfig
    ) -> Sequence[float]:
        """Return nothing to choose by."""
        return [0.0] * len(candidates)

    def pick(self, scores: Sequence[float], costs: CostConfig, rng: random.Random) -> int:
        """Draw one by lot."""
        return rng.randrange(len(scores))


class PowerOfTwo(LeastLoaded):
    """The less loaded of two workers that were drawn by lot."""

    def pick(self, scores: Sequence[float], costs: CostConfig, rng: random.Random) -> int:
        """Draw two, and return the better."""
        if len(scores) == 1:
            return 0
        drawn = rng.sample(range(len(scores)), 2)
        return min(drawn, key=scores.__getitem__)


class RoundRobin:
    """Each worker in turn, by id, from wherever the last pick was.

    Joining and leaving workers do not disturb the turn of the others. The first pick
    is at random, so that several routers do not march in step.
    """

    def __init__(self) -> None:
        self._last: str | None = None
        self._ids: list[str] = []

    def score(
        self, candidates: Sequence[Candidate], demand: Demand, costs: CostConfig
    ) -> Sequence[float]:
        """Return how far off the turn of each is."""
        self._ids = [c.worker.member.id for c in candidates]
        last = self._last
        if last is None:
            return [0.0] * len(candidates)
        after = sum(name <= last for name in self._ids)
        count = len(candidates)
        return [float((at - after) % count) for at in range(count)]

    def pick(self, scores: Sequence[float], costs: CostConfig, rng: random.Random) -> int:
        """Return the next in turn."""
        least = min(scores)
        at = scores.index(least) if self._last is not None else rng.randrange(len(scores))
        self._last = self._ids[at]
        return at


class Session(LeastLoaded):
    """The same worker for all requests of a session, unless it has far more than its share.

    Every router finds the same worker and remembers nothing: each worker draws a number
    from the session's name, and the lowest wins. Those with more requests than
    `SESSION_SLACK` times the mean, and some more, are passed over. If a worker goes, only
    its own sessions move. Requests without a session go to the least loaded.
    """

    def score(
        self, candidates: Sequence[Candidate], demand: Demand, costs: CostConfig
    ) -> Sequence[float]:
        """Return each one's draw, from 0 to 1, and 1 more where the load is too high."""
        if not demand.session:
            return super().score(candidates, demand, costs)
        limit = SESSION_SLACK * sum(c.requests for c in candidates) / len(candidates)
        limit += SESSION_FLOOR
        session = demand.session.encode() + b"\0"
        return [
            xxh3_64_intdigest(session + c.id.encode()) / 2**64 + (c.requests >= limit)
            for c in candidates
        ]


BUILT_IN: Mapping[str, Callable[[], Policy]] = {
    "kv": KvAware,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "random": Random,
    "round_robin": RoundRobin,
    "session": Session,
}
