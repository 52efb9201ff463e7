"""How one worker is picked among those that can take a request. Pure.

A policy is a plug-in: a class found by name among the built-in ones, then by entry
point in the group `kvmesh.policies`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import NamedTuple, Protocol

from kvmesh.config import ConfigError
from services.router.state import WorkerState

ENTRY_POINT_GROUP = "kvmesh.policies"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of the workers.

    `max_tokens` 0: unknown. `block_hashes` are the prompt's full blocks of `block_size`
    tokens. `excluded` workers (by id) failed this request before. Smaller `priority`
    goes first.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int = 0
    block_hashes: Sequence[int] = ()
    block_size: int = 0
    excluded: frozenset[str] = frozenset()
    priority: int = 0


class Candidate(NamedTuple):
    """A worker with room for the request, and what weighs on it.

    `load_blocks` is its work in KV blocks: this router's reservations plus what others
    placed. It is never clamped.
    """

    worker: WorkerState
    load_blocks: float

    @property
    def id(self) -> str:
        """The worker's id in the registry."""
        return self.worker.id

    def cached_tokens(self, demand: Demand) -> int:
        """Return the leading prompt tokens it is thought to have cached."""
        return self.worker.cached_tokens(
            demand.block_hashes, demand.block_size, demand.prompt_tokens
        )


class Policy(Protocol):
    """Picks. One instance serves one pool: the workers of one model and role."""

    def pick(
        self, candidates: Sequence[Candidate], demand: Demand, rng: random.Random
    ) -> Candidate:
        """Return one of `candidates` (never empty, sorted by id).

        Called once per decision on the event loop: takes microseconds, never blocks.
        Chance comes from `rng` only. Reservations of earlier decisions are already in
        the loads.
        """
        ...


class RoundRobin:
    """Each worker in turn, by id, from wherever the last pick was.

    Joining and leaving workers do not disturb the turn of the others. The first pick
    is at random, so that several routers do not march in step.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    def pick(
        self, candidates: Sequence[Candidate], demand: Demand, rng: random.Random
    ) -> Candidate:
        """Return the next in turn."""
        last = self._last
        if last is None:
            chosen = rng.choice(candidates)
        else:
            chosen = next((c for c in candidates if c.id > last), candidates[0])
        self._last = chosen.id
        return chosen


class LeastLoaded:
    """The worker with the fewest blocks of load; equals are drawn by lot."""

    def pick(
        self, candidates: Sequence[Candidate], demand: Demand, rng: random.Random
    ) -> Candidate:
        """Return one of the least loaded."""
        least = min(c.load_blocks for c in candidates)
        ties = [c for c in candidates if c.load_blocks == least]
        return ties[0] if len(ties) == 1 else rng.choice(ties)


BUILT_IN: Mapping[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}


def find_policy(name: str) -> Callable[[], Policy]:
    """Return the factory of a policy. Raises `ConfigError` listing the names."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    plug_ins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plug_ins.names:
        factory: Callable[[], Policy] = plug_ins[name].load()
        return factory
    names = ", ".join(sorted({*BUILT_IN, *plug_ins.names}))
    raise ConfigError(f"routing.policy: {name!r} is not one of {names}")
