"""How fuzzers run: a few requests, the same every time, or as many as asked for."""

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings


class Fuzz:
    """Settings of one test run, and the outcomes that its fuzzers have seen.

    `requests` for each API, from all its fuzzers; None: as few as they say themselves, and
    the same every time. `seed` is for those that bring their own generator.
    """

    def __init__(self, requests: int | None) -> None:
        self.requests = requests
        self.seed = 0 if requests is None else random.SystemRandom().getrandbits(32)
        self.outcomes: dict[str, Counter[str]] = {}

    def count(self, usual: int, share: float) -> int:
        """Return how many requests to send: `usual`, or a share of what was asked for."""
        return usual if self.requests is None else max(1, round(self.requests * share))

    def run(self, test: Callable[[], None], count: int) -> None:
        """Run a hypothesis test without arguments of its own. Raises what it raises."""
        configured = settings(
            max_examples=count,
            derandomize=self.requests is None,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        configured(test)()

    def saw(self, fuzzer: str, outcome: str, count: int = 1) -> None:
        """Count how a request of a fuzzer ended, or several."""
        self.outcomes.setdefault(fuzzer, Counter())[outcome] += count

    def report(self) -> list[str]:
        """Return a line for each fuzzer: its requests by outcome."""
        return [
            f"{fuzzer}: {seen.total()} requests: "
            + ", ".join(f"{outcome} {count}" for outcome, count in seen.most_common())
            for fuzzer, seen in sorted(self.outcomes.items())
        ]
