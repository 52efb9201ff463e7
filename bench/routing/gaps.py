"""Many durations in little memory, each to half a percent."""

import math

_STEPS = 200  # per factor e
_LEAST = 1e-9


class Durations:
    """A weighted histogram of seconds."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration so many times."""
        at = round(math.log(max(seconds, _LEAST)) * _STEPS)
        self._counts[at] = self._counts.get(at, 0) + count
        self._total += count

    def quantile(self, share: float) -> float:
        """Return what that share of them is at most, in seconds; 0 if there are none."""
        left = share * self._total
        for at in sorted(self._counts):
            left -= self._counts[at]
            if left <= 0:
                return math.exp(at / _STEPS)
        return 0.0
