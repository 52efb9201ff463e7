"""How fuzzers run: a few requests, the same every time, or as many as asked for."""

from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings


class Fuzz:
    """Settings of one test run, and the outcomes that its fuzzers have seen.

    `requests` for each fuzzer; None: as few as the fuzzer says, and no chance in them.
    """

    def __init__(self, requests: int | None) -> None:
        self.requests = requests
        self.outcomes: dict[str, Counter[str]] = {}

    def count(self, usual: int) -> int:
        """Return how many requests to send, where `usual` are sent in a usual run."""
        return self.requests or usual

    def run(self, test: Callable[[], None], usual: int) -> None:
        """Run a hypothesis test without arguments of its own. Raises what it raises."""
        configured = settings(
            max_examples=self.count(usual),
            derandomize=self.requests is None,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        configured(test)()

    def saw(self, fuzzer: str, outcome: str) -> None:
        """Count how one request of a fuzzer ended."""
        self.outcomes.setdefault(fuzzer, Counter())[outcome] += 1

    def report(self) -> list[str]:
        """Return a line for each fuzzer: its requests by outcome."""
        return [
            f"{fuzzer}: {seen.total()} requests: "
            + ", ".join(f"{outcome} {count}" for outcome, count in seen.most_common())
            for fuzzer, seen in sorted(self.outcomes.items())
        ]
