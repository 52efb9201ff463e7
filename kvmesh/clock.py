"""Time as an argument: code takes a `Clock`, tests pass a fake one."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. Both methods are cheap and never block."""

    def now(self) -> float:
        """Return seconds on a steady clock; only differences mean anything."""
        ...

    def wall(self) -> float:
        """Return seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()  # noqa: TID251 - this is where the ban leads

    def wall(self) -> float:
        """Return `time.time()`."""
        return time.time()  # noqa: TID251 - this is where the ban leads
