"""How quickly a line moves, and so how long one is likely to wait in it. Pure."""

HORIZON = 16
"""Admissions over which the pace is averaged: recent enough to follow a change of load."""

EVIDENCE = 8
"""Admissions before which nothing is said."""


class Pace:
    """The time from one admission to the next, since there has been a line without a break.

    While nobody waits requests are planned as they come, which says nothing of how quickly
    a line would move: so a new line has a new pace.
    """

    __slots__ = ("_count", "_interval", "_last")

    def __init__(self, now: float) -> None:
        self._last = now
        self._interval = 0.0
        self._count = 0

    def served(self, count: int, now: float) -> None:
        """Note that so many (1 or more) got a place at once."""
        interval = max(0.0, now - self._last) / count
        self._last = now
        self._count += count
        share = min(1.0, count / min(self._count, HORIZON))
        self._interval += (interval - self._interval) * share

    def wait(self, position: int) -> float | None:
        """Return in how many seconds the `position`th is to be served; None: not known yet."""
        return None if self._count < EVIDENCE else position * self._interval
