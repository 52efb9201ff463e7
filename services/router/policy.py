"""How one worker is picked among those that can take a request: filter, score, pick. Pure.

The planner filters: what comes to a policy has room. A policy scores the candidates and
picks one by the scores. It is a plug-in, found by name: see `services.router.plugins`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.router.cost import CostConfig, Work
from services.router.worker import WorkerState


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of the workers.

    `max_tokens` 0: unknown. `block_hashes` are the prompt's full blocks of `block_size`
    tokens. `excluded` workers (by id) failed this request before. Smaller `priority`
    goes first; where requests wait, those with different `fair_key` share alike. Requests
    of one `session` belong together; empty: of none.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int = 0
    block_hashes: Sequence[int] = ()
    block_size: int = 0
    excluded: frozenset[str] = frozenset()
    priority: int = 0
    session: str = ""
    fair_key: str = ""


class Candidate(NamedTuple):
    """A worker with room for the request, and what weighs on it.

    All figures are this router's reservations plus what others placed, and never clamped.
    `load_blocks` is all its work in KV blocks, of so many `requests`. Of the prompt
    `cached_tokens` are cached there, or are about to be; the last one never. `work` is
    what the cost formulas ask for.
    """

    worker: WorkerState
    load_blocks: float
    requests: int
    cached_tokens: int
    work: Work

    @property
    def id(self) -> str:
        """The worker's id in the registry."""
        return self.worker.id


class Policy(Protocol):
    """Scores and picks. One instance serves one pool: the workers of one model and role.

    Both are called once per decision on the event loop: they take microseconds for each
    candidate and never block. `candidates` are never empty and sorted by id.
    Reservations of earlier decisions are already in their figures.
    """

    def score(
        self, candidates: Sequence[Candidate], demand: Demand, costs: CostConfig
    ) -> Sequence[float]:
        """Return one score for each candidate; the lower, the better."""
        ...

    def pick(self, scores: Sequence[float], costs: CostConfig, rng: random.Random) -> int:
        """Return the number of the candidate to take. Chance comes from `rng` only."""
        ...


class LowestScore:
    """A pick for policies to inherit: the lowest score; equals are drawn by lot.

    With a temperature others have a chance too, which shrinks by e for each temperature
    of the mean score that they are worse.
    """

    def pick(self, scores: Sequence[float], costs: CostConfig, rng: random.Random) -> int:
        """Return the number of one of the best."""
        least = min(scores)
        if costs.temperature > 0:
            unit = costs.temperature * (sum(scores) / len(scores) or 1.0)
            odds = [math.exp((least - score) / unit) for score in scores]
            return rng.choices(range(len(scores)), odds)[0]
        if scores.count(least) == 1:
            return scores.index(least)
        return rng.choice([at for at, score in enumerate(scores) if score == least])
