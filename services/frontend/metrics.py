"""What a frontend counts and measures, for each request once."""

from enum import StrEnum
from functools import partial

from kvmesh.errors import Reason
from kvmesh.telemetry import Meter

ITL_SAMPLE = 16
"""One gap between texts in so many is recorded: recording costs more than sending one."""


class Outcome(StrEnum):
    """How a request ended, for metrics. Values are label values."""

    OK = "ok"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    FAILED = "failed"


_OUTCOMES = {
    Reason.INVALID_ARGUMENT: Outcome.INVALID,
    Reason.UNKNOWN_MODEL: Outcome.INVALID,
    Reason.CONTEXT_LENGTH_EXCEEDED: Outcome.INVALID,
    Reason.REQUEST_TOO_LARGE: Outcome.INVALID,
    Reason.OVERLOADED: Outcome.OVERLOADED,
    Reason.SLOW_READER: Outcome.OVERLOADED,
    Reason.DEADLINE_EXCEEDED: Outcome.TIMEOUT,
    Reason.CANCELLED: Outcome.CANCELLED,
    Reason.UNAVAILABLE: Outcome.UNAVAILABLE,
    Reason.DRAINING: Outcome.UNAVAILABLE,
}


class Step(StrEnum):
    """Where an attempt failed, for metrics. Values are label values."""

    TOKENIZE = "tokenize"
    PREFILL = "prefill"
    DECODE = "decode"


class FrontendMetrics:
    """The instruments. Everything is recorded in the event loop."""

    def __init__(self, meter: Meter) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.fallbacks = 0
        self.orphans = 0
        self._gaps = 0
        self._requests = meter.counter(
            "kvmesh_requests", "Requests, by how they ended.", labels=("outcome",)
        )
        self._retries = meter.counter(
            "kvmesh_retries", "Attempts that failed and were made again.", labels=("step",)
        )
        self._ttft = meter.histogram("kvmesh_ttft", "Time to the first generated token.")
        self._itl = meter.histogram(
            "kvmesh_itl", f"Time between texts of one request; one in {ITL_SAMPLE} is recorded."
        )
        self._e2e = meter.histogram("kvmesh_e2e", "Time from a request to the end of its answer.")
        for name, description in _TOTALS.items():
            meter.counter_from(f"kvmesh_{name}", description, partial(getattr, self, name))

    def ended(self, outcome: Outcome) -> None:
        """Count a request that has ended, or was refused before it began."""
        self._requests.add(outcome=outcome)

    def refused(self, reason: Reason) -> None:
        """Count a request that failed for this reason."""
        self.ended(_OUTCOMES.get(reason, Outcome.FAILED))

    def retried(self, step: Step) -> None:
        """Count an attempt that failed and is made again."""
        self._retries.add(step=step)

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token."""
        self._ttft.record(seconds)

    def gap(self, seconds: float) -> None:
        """Record, for one in `ITL_SAMPLE`, the time since a request's text before."""
        self._gaps += 1
        if self._gaps % ITL_SAMPLE == 0:
            self._itl.record(seconds)

    def duration(self, seconds: float) -> None:
        """Record how long a complete answer took."""
        self._e2e.record(seconds)


_TOTALS = {
    "prompt_tokens": "Prompt tokens of all requests that were encoded.",
    "completion_tokens": "Tokens generated for all requests.",
    "fallbacks": "Requests placed without a router, as none was reachable.",
    "orphans": "KV tickets that were given back without a decode.",
}
