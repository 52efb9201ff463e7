"""The last decisions, for those who ask why. Nothing becomes text before somebody reads.

What is remembered are figures and names of ours: no hash, and of a request its id only.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvmesh.clock import Clock
from kvmesh.errors import MeshError, OverloadedError, Reason
from kvmesh.telemetry import OTHER
from services.router.planner import Decision
from services.router.policy import Candidate, Demand

KEPT_CANDIDATES = 4
"""Candidates of each role that an entry has: the best ones."""

SORTED_AT_MOST = 256
"""Candidates up to which sorting all of them is the quickest way to the best few."""

MAX_FOLLOWERS = 16
"""Readers that follow at once: each costs every decision a look at its filter."""

MAX_BEHIND = 1024
"""Entries that wait for one reader: seconds of a busy router."""

MAX_ID_CHARS = 128
"""Characters of a request's id that are kept: it is its frontend's word."""


@dataclass(frozen=True, slots=True)
class DecisionsConfig:
    """The memory of decisions."""

    kept: int = field(
        default=1000,
        metadata={"help": "decisions remembered, some 2 KB each", "min": 0, "max": 100_000},
    )


class Outcome(StrEnum):
    """What came of a request at the router."""

    REMOTE = "remote"
    LOCAL = "local"
    REFUSED = "refused"
    CANCELLED = "cancelled"


class Scored(NamedTuple):
    """A candidate as it was when it was scored; the lower, the better."""

    worker_id: str
    score: float
    cached_tokens: int
    load_blocks: float
    requests: int


@dataclass(slots=True)
class Entry:
    """One decision; only `cached_tokens` changes, once it is known what was cached in truth.

    `time` is in Unix seconds, `waited` in seconds. `position` in the queue counts from 1;
    0: it did not wait. Without a plan `policy` and the workers are empty, and `reason` is
    that of the error. Candidates are the best few, the best first.
    """

    number: int
    time: float
    request_id: str
    model: str
    outcome: Outcome
    reason: str
    prompt_tokens: int
    waited: float
    position: int
    excluded: Sequence[str] = ()
    policy: str = ""
    decode: str = ""
    prefill: str = ""
    expected_tokens: int = 0
    decode_candidates: Sequence[Scored] = ()
    prefill_candidates: Sequence[Scored] = ()
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries somebody wants: those that are as all of these say; empty: any.

    `worker` is one that was chosen, to decode or to prefill.
    """

    model: str = ""
    worker: str = ""
    policy: str = ""
    request_id: str = ""
    outcomes: frozenset[Outcome] = frozenset()

    def wants(self, entry: Entry) -> bool:
        """Return whether an entry passes."""
        return (
            (not self.model or entry.model == self.model)
            and (not self.worker or self.worker in (entry.decode, entry.prefill))
            and (not self.policy or entry.policy == self.policy)
            and (not self.request_id or entry.request_id == self.request_id)
            and (not self.outcomes or entry.outcome in self.outcomes)
        )


class Follower:
    """What one reader has not read yet. Bounded: the oldest is dropped, and counted."""

    def __init__(self, wanted: Filter) -> None:
        self._wanted = wanted
        self._unread: deque[Entry] = deque(maxlen=MAX_BEHIND)
        self._dropped = 0
        self._some = asyncio.Event()

    def offer(self, entry: Entry) -> bool:
        """Take an entry, if it is wanted; return whether an older one had to go for it."""
        if not self._wanted.wants(entry):
            return False
        full = len(self._unread) == MAX_BEHIND
        self._dropped += full
        self._unread.append(entry)
        self._some.set()
        return full

    async def next(self, most: int) -> tuple[int, list[Entry]]:
        """Wait for entries; return how many were dropped before them, and up to `most`."""
        await self._some.wait()
        unread, dropped = self._unread, self._dropped
        self._dropped = 0
        entries = [unread.popleft() for _ in range(min(most, len(unread)))]
        if not unread:
            self._some.clear()
        return dropped, entries


class DecisionLog:
    """Remembers the last decisions, and passes each on to those who follow.

    `known` says whether a model's name is one of the mesh's. For one event loop.
    """

    def __init__(self, config: DecisionsConfig, known: Callable[[str], bool], clock: Clock) -> None:
        self.dropped = 0
        """Entries that followers were too slow for."""
        self._known = known
        self._clock = clock
        self._count = 0
        self._entries: deque[Entry] = deque(maxlen=config.kept)
        self._followers: list[Follower] = []

    @property
    def followers(self) -> int:
        """Readers that follow now."""
        return len(self._followers)

    def decided(self, demand: Demand, decision: Decision, waited: float, position: int) -> Entry:
        """Remember a plan."""
        plan = decision.plan
        entry = self._entry(
            demand, Outcome.LOCAL if plan.prefill is None else Outcome.REMOTE, plan.reason
        )
        entry.model = demand.model
        entry.waited, entry.position = waited, position
        entry.policy = decision.policy
        entry.decode = plan.decode.id
        entry.prefill = "" if plan.prefill is None else plan.prefill.id
        entry.expected_tokens = plan.expected_cached_tokens
        entry.decode_candidates = best(decision.decode_candidates, decision.decode_scores)
        if len(decision.prefill_scores):
            entry.prefill_candidates = best(decision.prefill_candidates, decision.prefill_scores)
        self._add(entry)
        return entry

    def refused(self, demand: Demand, error: MeshError, waited: float, position: int) -> Entry:
        """Remember that a request got no plan, or was not wanted any more."""
        cancelled = error.reason is Reason.CANCELLED
        outcome = Outcome.CANCELLED if cancelled else Outcome.REFUSED
        entry = self._entry(demand, outcome, error.reason.value)
        # What nobody announced is the caller's own word.
        entry.model = demand.model if self._known(demand.model) else OTHER
        entry.waited, entry.position = waited, position
        self._add(entry)
        return entry

    def recent(self, wanted: Filter, most: int | None) -> list[Entry]:
        """Return the newest remembered entries that are wanted, the oldest first."""
        found = [entry for entry in self._entries if wanted.wants(entry)]
        return found if most is None else found[len(found) - min(most, len(found)) :]

    @contextmanager
    def follow(self, wanted: Filter) -> Iterator[Follower]:
        """Yield what gets every wanted entry from now on.

        Raises `OverloadedError` if too many follow already.
        """
        if len(self._followers) >= MAX_FOLLOWERS:
            raise OverloadedError(f"{MAX_FOLLOWERS} readers follow the decisions already")
        follower = Follower(wanted)
        self._followers.append(follower)
        try:
            yield follower
        finally:
            self._followers.remove(follower)

    def _entry(self, demand: Demand, outcome: Outcome, reason: str) -> Entry:
        self._count += 1
        return Entry(
            self._count,
            self._clock.wall(),
            demand.request_id[:MAX_ID_CHARS],
            "",
            outcome,
            reason,
            demand.prompt_tokens,
            0.0,
            0,
            tuple(sorted(demand.excluded)),
        )

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        for follower in self._followers:
            self.dropped += follower.offer(entry)


def best(
    candidates: Sequence[Candidate], scores: Sequence[float], count: int = KEPT_CANDIDATES
) -> list[Scored]:
    """Return the candidates of the lowest scores, the lowest first.

    They are copied out: the candidates of a decision in a large mesh are megabytes.
    """
    numbers, score = range(len(scores)), scores.__getitem__
    if len(numbers) > SORTED_AT_MOST:
        order = heapq.nsmallest(count, numbers, key=score)
    else:
        order = sorted(numbers, key=score)[:count]
    found = []
    for at in order:
        worker, load_blocks, requests, cached, _ = candidates[at]
        found.append(Scored(worker.id, float(score(at)), cached, load_blocks, requests))
    return found
