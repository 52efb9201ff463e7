"""What a frontend counts and measures: each request once, under both of its names.

`kvmesh_*` for our dashboards, `gen_ai.*` as OpenTelemetry's conventions want it. Labels
are enums and names of models that the fleet knows: nothing that a caller wrote.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from kvmesh.errors import InternalError, MeshError, Reason
from kvmesh.host.engine_metrics import ERROR
from kvmesh.telemetry import OTHER, Histogram, Meter, Series
from kvmesh.types import Usage

PROVIDER = "kvmesh"
"""What we are as `gen_ai.provider.name`."""


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
    Reason.UNAUTHENTICATED: Outcome.INVALID,
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


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that is over. `reason` is None if all of its answers are complete.

    `finish_reasons` has one for each answer. `usage` is None where nothing was encoded.
    """

    seconds: float
    reason: Reason | None
    finish_reasons: tuple[str, ...]
    usage: Usage | None


class FrontendMetrics:
    """The instruments. Everything is recorded in the event loop.

    `known` says whether a model's name is one of the fleet's.
    """

    def __init__(self, meter: Meter, known: Callable[[str], bool]) -> None:
        self.fallbacks = 0
        self.orphans = 0
        self.migrations = 0
        self._known = known
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._instruments = _Instruments(meter)
        self._retries = meter.counter(
            "kvmesh_retries", "Attempts that failed and were made again.", labels=("step",)
        )
        for name, description in _TOTALS.items():
            meter.counter_from(f"kvmesh_{name}", description, partial(getattr, self, name))

    def model(self, name: str) -> str:
        """Return a model's name as a label: `other` if nobody ever announced it."""
        return name if self._known(name) else OTHER

    def of(self, model: str, operation: str) -> "Lane":
        """Return where requests of an operation to a model are recorded."""
        key = (self.model(model), operation)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(self._instruments, *key)
        return lane

    def refused(self, reason: Reason, model: str = OTHER) -> None:
        """Count a request that was refused before it began."""
        self._instruments.count(self.model(model), reason, (ERROR,))

    def retried(self, step: Step, *, migrates: bool = False) -> None:
        """Count an attempt that failed and is made again, or goes on elsewhere."""
        self._retries.add(step=step)
        self.migrations += migrates


class Lane:
    """What is recorded of one operation on one model."""

    def __init__(self, instruments: "_Instruments", model: str, operation: str) -> None:
        self.model = model
        self._instruments = instruments
        self._named = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
        }
        self._ttft = self._both(instruments.ttft, instruments.gen_ai_ttft)
        self._tpot = self._both(instruments.tpot, instruments.gen_ai_tpot)
        self._e2e = instruments.e2e.series(model=model)
        self._itl = instruments.itl.series(model=model)

    def first_token(self, seconds: float) -> None:
        """Record the time from a request to its first generated token."""
        for series in self._ttft:
            series.record(seconds)

    def gap(self, seconds: float) -> None:
        """Record the time since the text before, of the same answer."""
        self._itl.record(seconds)

    def per_token(self, seconds: float) -> None:
        """Record an answer's mean time for each token after its first."""
        for series in self._tpot:
            series.record(seconds)

    def ended(self, ending: Ending) -> None:
        """Record a request that is over."""
        instruments = self._instruments
        instruments.count(self.model, ending.reason, ending.finish_reasons)
        error = {"error.type": ending.reason.value if ending.reason else ""}
        instruments.gen_ai_duration.record(ending.seconds, **self._named, **error)
        if ending.reason is None:
            self._e2e.record(ending.seconds)
        if ending.usage is not None:
            instruments.use(self.model, ending.usage, self._named)

    def _both(self, ours: Histogram, standard: Histogram) -> tuple[Series, Series]:
        return ours.series(model=self.model), standard.series(**self._named)


def reason_of(error: BaseException) -> Reason:
    """Return why a request ended as it did: whoever waits for it is cancelled, or it failed."""
    if isinstance(error, MeshError):
        return error.reason
    return InternalError.reason if isinstance(error, Exception) else Reason.CANCELLED


class _Instruments:
    def __init__(self, meter: Meter) -> None:
        counter = partial(meter.counter, labels=("model",))
        ours = partial(meter.histogram, labels=("model",))
        standard = partial(meter.histogram, labels=_STANDARD)
        self._requests = meter.counter(
            "kvmesh_requests", "Requests, by how they ended.", labels=("model", "outcome")
        )
        self._errors = meter.counter(
            "kvmesh_request_errors", "Requests that failed, by why.", labels=("model", "reason")
        )
        self._finished = meter.counter(
            "kvmesh_finished", "Answers, by why they ended.", labels=("model", "finish_reason")
        )
        self._tokens = {
            "prompt_tokens": counter("kvmesh_prompt_tokens", "Prompt tokens, once a prompt."),
            "completion_tokens": counter("kvmesh_completion_tokens", "Tokens of all answers."),
            "cached_tokens": counter("kvmesh_cached_tokens", "Prompt tokens found cached."),
        }
        self.ttft = ours("kvmesh_ttft", "Time to the first generated token.")
        self.itl = ours("kvmesh_itl", "Time between texts of one answer.")
        self.tpot = ours("kvmesh_tpot", "An answer's mean time for each token after its first.")
        self.e2e = ours("kvmesh_e2e", "Time from a request to the end of its answer.")
        self.gen_ai_ttft = standard(
            "gen_ai.server.time_to_first_token",
            "Time to generate first token for successful responses.",
            buckets=_TTFT_BUCKETS,
        )
        self.gen_ai_tpot = standard(
            "gen_ai.server.time_per_output_token",
            "Time per output token generated after the first token for successful responses.",
            buckets=_TPOT_BUCKETS,
        )
        self.gen_ai_duration = meter.histogram(
            "gen_ai.server.request.duration",
            "Generative AI server request duration such as time-to-last byte or last output token.",
            labels=(*_STANDARD, "error.type"),
            buckets=_DURATION_BUCKETS,
        )
        self._usage = meter.histogram(
            "gen_ai.client.token.usage",
            "Number of input and output tokens used.",
            labels=(*_STANDARD, "gen_ai.token.type"),
            unit="{token}",
            buckets=_TOKEN_BUCKETS,
        )

    def count(self, model: str, reason: Reason | None, finish_reasons: Iterable[str]) -> None:
        outcome = Outcome.OK if reason is None else _OUTCOMES.get(reason, Outcome.FAILED)
        self._requests.add(model=model, outcome=outcome.value)
        if reason is not None:
            self._errors.add(model=model, reason=reason.value)
        for finish_reason in finish_reasons:
            self._finished.add(model=model, finish_reason=finish_reason)

    def use(self, model: str, usage: Usage, named: Mapping[str, str]) -> None:
        for name, counter in self._tokens.items():
            counter.add(getattr(usage, name), model=model)
        for kind, count in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
            self._usage.record(count, **named, **{"gen_ai.token.type": kind})


_STANDARD = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")

# As the conventions say, and further: up to beyond the longest a request may take.
_LONG = (163.84, 327.68, 655.36)
_DURATION_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *_LONG,
)
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.48, 40.96, 81.92, *_LONG),
)
_TPOT_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0),
)
_TOKEN_BUCKETS = tuple(float(4**power) for power in range(14))

_TOTALS = {
    "fallbacks": "Requests placed without a router, as none was reachable.",
    "orphans": "KV tickets that were given back without a decode.",
    "migrations": "Answers that went on elsewhere after their worker had failed.",
}
