"""How likely the simulated model finds each token: its distribution, and picking by it. Pure.

The digest of a sequence puts all token ids in an order. The one in place r, from 0, has
probability 1 / ((r + 1) (r + 2)), which adds up to one but for what lies behind the last.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kvmesh.engine.sim.model import SimModel
from kvmesh.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Ranking:
    """All ids of a model in order, likeliest first; the first is what it picks.

    From `first` on around the ids that it samples, then its special ids. `drawn` is an end of
    text that stands before all of them.
    """

    low: int
    high: int
    first: int
    drawn: int | None = None

    def __iter__(self) -> Iterator[int]:
        """Yield all ids in order."""
        if self.drawn is not None:
            yield self.drawn
        for ids in (range(self.first, self.high), range(self.low, self.first), range(self.low)):
            yield from (token for token in ids if token != self.drawn)

    def rank(self, token: int) -> int:
        """Return the place of a token."""
        if self.drawn is None:
            return self._place(token)
        if token == self.drawn:
            return 0
        return self._place(token) + (self._place(token) < self._place(self.drawn))

    def logprob(self, token: int) -> float:
        """Return the natural logarithm of a token's probability."""
        rank = self.rank(token)
        return -math.log((rank + 1) * (rank + 2))

    def _place(self, token: int) -> int:
        if token < self.low:
            return self.high - self.low + token
        return (token - self.first) % (self.high - self.low)


def ranking(model: SimModel, digest: int, salt: int = 0) -> Ranking:
    """Return the order of a model's ids behind a sequence with this digest.

    `salt` stands for the random stream, as in `SimModel.pick`: 0 is the model's own.
    """
    value = model.mix(digest, salt)
    drawn = model.eos_token_id if model.draws_eos(value) else None
    return Ranking(model.low, model.high, model.low + value % (model.high - model.low), drawn)


def choose(
    order: Ranking,
    *,
    banned: frozenset[int],
    bias: Mapping[int, float],
    allowed: Collection[int],
) -> int:
    """Return the likeliest token after `bias` is added, of those that may be picked.

    These are `allowed`, or all if it is empty, but not those `banned`; there must be one.
    """
    candidates = allowed or _contenders(order, banned, bias)
    return max(
        (token for token in candidates if token not in banned),
        key=lambda token: (order.logprob(token) + bias.get(token, 0.0), -order.rank(token)),
    )


def told(order: Ranking, token: int, count: int) -> TokenLogprob:
    """Return how likely a token is, which place it has, and the `count` likeliest."""
    top = tuple((each, order.logprob(each)) for each, _ in zip(order, range(count), strict=False))
    return TokenLogprob(order.logprob(token), top, order.rank(token) + 1)


def _contenders(order: Ranking, banned: frozenset[int], bias: Mapping[int, float]) -> Iterator[int]:
    """Yield the tokens that a bias moves, and the likeliest of the others."""
    yield from bias
    for token in order:
        if token not in banned and token not in bias:
            yield token
            return
