"""Instruments: counters, histograms and gauges with bounded labels.

Names are `kvmesh_*` for ours and `gen_ai.*` for the standard ones. Prometheus sees
units and `_total` appended: `kvmesh_requests` becomes `kvmesh_requests_total`, and
`kvmesh_ttft` in `s` becomes `kvmesh_ttft_seconds`.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.metrics import CallbackOptions, CallbackT, Observation
from opentelemetry.metrics import Histogram as OtelHistogram
from opentelemetry.metrics import Meter as OtelMeter

# The same in every process, so that quantiles can be taken over a sum of them. The
# top is the longest a request may take; the bottom a step of a fast simulated engine.
DURATION_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
SIZE_BUCKETS = tuple(float(4**power) for power in range(13))

# Label sets of one instrument. Labels are outcomes, roles, worker ids: far below it.
# Past it values are still counted, under OTHER, so that a mistake can't eat the memory.
MAX_LABEL_SETS = 256
OTHER = "other"

_NAME = re.compile(r"kvmesh_[a-z0-9_]+|gen_ai\.[a-z0-9_.]+")

Reading = float | Mapping[tuple[str, ...], float]


class Meter:
    """Makes instruments; each name once in a process."""

    def __init__(self, inner: OtelMeter) -> None:
        self._inner = inner
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
    ) -> "Histogram":
        """Return a histogram: of seconds, if nothing else is said."""
        self._claim(name)
        inner = self._inner.create_histogram(
            name, unit, description, explicit_bucket_boundaries_advisory=buckets
        )
        return Histogram(inner, labels)

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
        self._labels = _Labels(labels)
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


class Histogram:
    """A distribution for each set of label values. May be used from any thread."""

    def __init__(self, inner: OtelHistogram, labels: Sequence[str] = ()) -> None:
        self._inner = inner
        self._labels = _Labels(labels)
        self._lock = threading.Lock()

    def record(self, value: float, **labels: str) -> None:
        """Add a value under exactly these labels."""
        with self._lock:
            key = self._labels.key(labels)
        self._inner.record(value, dict(zip(self._labels.names, key, strict=True)))


class _Labels:
    """The label sets of an instrument. Not locked."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._known: set[tuple[str, ...]] = set()

    def key(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        if len(labels) != len(self.names):
            raise ValueError(f"labels are {self.names}, not {tuple(labels)}")
        key = tuple([labels[name] for name in self.names])
        if key in self._known:
            return key
        if len(self._known) >= MAX_LABEL_SETS:
            return (OTHER,) * len(self.names)
        self._known.add(key)
        return key


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
