"""How quickly workers compute prompts, learned from what their prompts took. Pure.

A worker's figure moves with each prompt towards what that one took, and between prompts
slowly back to what is typical of its pool: so a worker that was slow for a while, and was
given no more prompts for it, gets its next chance.
"""

from kvmesh.types import Role

LEAST_TOKENS = 256
"""Shorter prompts tell more of the way there and back than of computing."""

LEARNING = 0.2
"""How far one prompt moves its worker's figure."""

TYPICAL_LEARNING = 0.05
"""How far it moves that of all."""

FORGETTING = 0.002
"""How far one report of a worker moves its figure back to what is typical."""

WIDEST = 8.0
"""A prompt counts for at most so many times what was known, or for as small a part."""

Pool = tuple[str, Role]


class Speeds:
    """What a prompt token typically takes in each pool, and what that makes of its workers.

    All figures are microseconds for each token; 0: not known.
    """

    def __init__(self) -> None:
        self._typical: dict[Pool, float] = {}

    def typical(self, pool: Pool) -> float:
        """Return what a token typically takes in a pool."""
        return self._typical.get(pool, 0.0)

    def learned(self, pool: Pool, known: float, tokens: float, seconds: float) -> float:
        """Return a worker's figure, `known` so far, after it had so long for its tokens.

        Those that were queued before a prompt are counted with it.
        """
        if tokens < LEAST_TOKENS or seconds <= 0:
            return known
        sample = seconds / tokens * 1e6
        typical = self._typical.get(pool, sample)
        known = known or typical
        sample = min(max(sample, known / WIDEST), known * WIDEST)
        self._typical[pool] = typical + TYPICAL_LEARNING * (sample - typical)
        return known + LEARNING * (sample - known)

    def drifted(self, pool: Pool, known: float) -> float:
        """Return a worker's figure a report later."""
        return known + FORGETTING * (self.typical(pool) - known) if known else known
