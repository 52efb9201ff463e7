"""Instruments: counters, histograms and gauges with bounded labels.

Names are `kvmesh_*` for ours and `gen_ai.*` for the standard ones. Prometheus sees
units and `_total` appended: `kvmesh_requests` becomes `kvmesh_requests_total`, and
`kvmesh_ttft` in `s` becomes `kvmesh_ttft_seconds`.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.metrics import CallbackOptions, CallbackT, Observation
from opentelemetry.metrics import Meter as OtelMeter

from kvmesh.telemetry.histogram import Histogram
from kvmesh.telemetry.labels import MAX_LABEL_SETS, OTHER, Labels

__all__ = ["DURATION_BUCKETS", "MAX_LABEL_SETS", "OTHER", "Counter", "Histogram", "Meter"]

# The same in every process, so that quantiles can be taken over a sum of them. The
# top is beyond the longest a request may take, so that one which ran out of time is
# still in a bucket; the bottom a step of a fast simulated engine.
DURATION_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0),
)

_NAME = re.compile(r"kvmesh_[a-z0-9_]+|gen_ai\.[a-z0-9_.]+")

Reading = float | Mapping[tuple[str, ...], float]


class Meter:
    """Makes instruments; each name once in a process."""

    def __init__(self, inner: OtelMeter, histograms: list[Histogram]) -> None:
        """Take the SDK's meter, and the list that readers find histograms in."""
        self._inner = inner
        self._histograms = histograms
        self._names: set[str] = set()

    def counter(
        self, name: str, description: str, *, labels: Sequence[str] = (), unit: str = ""
    ) -> "Counter":
        """Return a counter that only grows."""
        counter = Counter(labels)
        self.counter_from(name, description, counter.read, labels=labels, unit=unit)
        return counter

    def up_down(
        self, name: str, description: str, *, labels: Sequence[str] = (), unit: str = ""
    ) -> "Counter":
        """Return a counter that also shrinks, such as of requests in flight."""
        counter = Counter(labels)
        self.gauge(name, description, counter.read, labels=labels, unit=unit)
        return counter

    def histogram(
        self,
        name: str,
        description: str,
        *,
        labels: Sequence[str] = (),
        unit: str = "s",
        buckets: Sequence[float] = DURATION_BUCKETS,
    ) -> Histogram:
        """Return a histogram: of seconds, if nothing else is said."""
        self._claim(name)
        histogram = Histogram(name, description, labels=labels, unit=unit, buckets=buckets)
        self._histograms.append(histogram)
        return histogram

    def gauge(
        self,
        name: str,
        description: str,
        read: Callable[[], Reading],
        *,
        labels: Sequence[str] = (),
        unit: str = "",
    ) -> None:
        """Show what `read` returns: a number, or one for each tuple of label values.

        It is called at each collection, in any thread; it must be quick, and return a
        new mapping rather than one that changes.
        """
        self._claim(name)
        self._inner.create_observable_gauge(name, [_observe(read, labels)], unit, description)

    def counter_from(
        self,
        name: str,
        description: str,
        read: Callable[[], Reading],
        *,
        labels: Sequence[str] = (),
        unit: str = "",
    ) -> None:
        """Show a total that is kept elsewhere and only grows; `read` as for `gauge`."""
        self._claim(name)
        self._inner.create_observable_counter(name, [_observe(read, labels)], unit, description)

    def _claim(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"metric {name!r} is called neither kvmesh_* nor gen_ai.*")
        if name in self._names:
            raise ValueError(f"metric {name!r} exists already")
        self._names.add(name)


class Counter:
    """A sum for each set of label values. May be used from any thread."""

    def __init__(self, labels: Sequence[str] = ()) -> None:
        self._labels = Labels(labels)
        self._lock = threading.Lock()
        # Without labels the sum is shown from the start, as 0.
        self._sums: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the sum of exactly these labels."""
        with self._lock:
            key = self._labels.key(labels)
            self._sums[key] = self._sums.get(key, 0) + amount

    def read(self) -> Mapping[tuple[str, ...], float]:
        """Return a copy of the sums by label values."""
        with self._lock:
            return dict(self._sums)


def _observe(read: Callable[[], Reading], labels: Sequence[str]) -> CallbackT:
    def observe(options: CallbackOptions) -> Iterable[Observation]:
        reading = read()
        if not isinstance(reading, Mapping):
            return [Observation(reading)]
        return [
            Observation(value, dict(zip(labels, key, strict=True)))
            for key, value in list(reading.items())[: MAX_LABEL_SETS + 1]
        ]

    return observe
