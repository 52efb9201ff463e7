"""Whether a prefill worker computes a prompt, or the decode worker itself, and which one. Pure.

Both ways are priced with the decode worker that suits each best: a prompt is computed where
few answers would pause for it, and KV is pulled by one that is busy decoding anyhow, so that
such workers remain.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.candidates import requests_of, works_of
from services.router.cost import (
    MICRO,
    CostConfig,
    local_prefill_seconds,
    remote_decode_seconds,
    remote_prefill_seconds,
    transfer_seconds,
)
from services.router.policy import Candidate


@dataclass(frozen=True, slots=True)
class Split:
    """The better decode worker for each way, and what each way costs in seconds."""

    local: Candidate
    remote: Candidate
    local_seconds: float
    remote_seconds: float

    @property
    def remotely(self) -> bool:
        """Whether a prefill worker is to compute the prompt. Equal: it is not."""
        return self.remote_seconds < self.local_seconds


def split(
    candidates: Sequence[Candidate],
    prefill: Candidate,
    token_seconds: float,
    costs: CostConfig,
    rng: random.Random,
) -> Split:
    """Price both ways with the one decode worker given, or the best of several.

    What is uncached on the decode worker is moved, in `token_seconds` each token. Equals are
    drawn by lot.
    """
    works, requests = works_of(candidates), requests_of(candidates)
    wait = prefill.work.queued * prefill.work.prefill_us * MICRO
    local = local_prefill_seconds(works, requests, wait, costs)
    here = _lowest(local, rng)
    there = candidates[_lowest(remote_decode_seconds(works, requests, token_seconds, costs), rng)]
    return Split(
        candidates[here],
        there,
        local[here],
        remote_prefill_seconds(prefill.work, prefill.requests, costs)
        + transfer_seconds(there.work.uncached, token_seconds, costs),
    )


def _lowest(seconds: Sequence[float], rng: random.Random) -> int:
    least = min(seconds)
    if seconds.count(least) == 1:
        return seconds.index(least)
    return rng.choice([at for at, each in enumerate(seconds) if each == least])
