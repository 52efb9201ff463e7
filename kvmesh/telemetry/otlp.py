"""Export over OTLP/gRPC that never gets in the way of serving.

A collector that is down or doesn't answer costs a bounded queue, one log line when it
begins and one when it ends, and at most a few seconds at exit. What couldn't be
delivered is counted.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from kvmesh.config import ConfigError
from kvmesh.telemetry.histogram import Histogram
from kvmesh.telemetry.trace import Tracer

_logger = logging.getLogger(__name__)

# What the last export of a signal may take at exit, and the end of a thread whose
# exporter was told to give up. For two signals one after the other it stays under 4 s.
_FLUSH_GRACE_S = 1.5
_GIVE_UP_S = 0.5

# They say once per failed export what `_Collector` says once per outage.
_NOISY = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal")


def endpoint(environ: Mapping[str, str], signal: str) -> str:
    """Return where a signal (`TRACES`, `METRICS`) is to be sent, "" for nowhere."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    if environ.get(f"OTEL_{signal}_EXPORTER", "otlp") == "none":
        return ""
    found = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT", ""
    )
    protocol = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"
    )
    if found and protocol != "grpc":
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not supported, use grpc"
            " (or set OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER to none)"
        )
    return found


class SpanCount:
    """Spans on their way to the collector, and those that didn't reach it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting = 0
        self.dropped = 0

    def admit(self) -> bool:
        """Count one span in if there is room; else it is dropped."""
        with self._lock:
            admitted = self._waiting < self._limit
            if admitted:
                self._waiting += 1
            else:
                self.dropped += 1
            return admitted

    def done(self, count: int, *, delivered: bool) -> None:
        """Count spans out."""
        with self._lock:
            self._waiting -= count
            if not delivered:
                self.dropped += count


@asynccontextmanager
async def exported_traces(
    address: str, resource: Resource, environ: Mapping[str, str]
) -> AsyncIterator[tuple[Tracer, SpanCount]]:
    """Trace to the collector at `address` while inside; leaving takes up to 2 s."""
    count = SpanCount(_positive(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 2048))
    exporter = _Spans(address, count)
    processor = _BoundedProcessor(exporter, count)
    with _quiet():
        try:
            yield tracer_to(processor, resource), count
        finally:
            await _finish(processor.shutdown, exporter)


def tracer_to(processor: SpanProcessor, resource: Resource) -> Tracer:
    """Return a tracer to any processor, which the caller shuts down."""
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return Tracer(provider.get_tracer("kvmesh"))


@asynccontextmanager
async def exported_metrics(
    address: str, environ: Mapping[str, str], histograms: Sequence[Histogram]
) -> AsyncIterator[MetricReader]:
    """Yield a reader that sends to the collector at `address`; leaving takes up to 2 s.

    The histograms go along with what the SDK collects, as cumulative ones.
    """
    interval_ms = _positive(environ, "OTEL_METRIC_EXPORT_INTERVAL", 60_000)
    exporter = _Metrics(address, histograms)
    # Never by itself: the task below asks it to, and is ended before the last export.
    reader = PeriodicExportingMetricReader(exporter, math.inf)
    with _quiet():
        exports = asyncio.create_task(_collect_every(interval_ms / 1000, reader))
        try:
            yield reader
        finally:
            exports.cancel()
            await asyncio.wait({exports})
            await _finish(reader.collect, exporter)


async def _collect_every(interval: float, reader: MetricReader) -> None:
    while True:
        await asyncio.sleep(interval)
        try:
            await asyncio.to_thread(reader.collect)
        except Exception:  # top of a background task
            _logger.exception("metrics could not be collected")


async def _finish(flush: Callable[[], None], exporter: SpanExporter | MetricExporter) -> None:
    """Send what is left, for as long as the grace lasts."""
    ending = asyncio.create_task(asyncio.to_thread(flush))
    done, _ = await asyncio.wait({ending}, timeout=_FLUSH_GRACE_S)
    # Also ends a call that hangs; what is still queued is refused at once.
    exporter.shutdown()
    if not done:
        await asyncio.wait({ending}, timeout=_GIVE_UP_S)


class _Collector:
    """Whether the collector takes what it is sent. Used by one exporter's thread."""

    def __init__(self, signal: str, address: str) -> None:
        self._what = f"export of {signal} to {address}"
        self._failing = False

    def note(self, delivered: bool) -> None:
        if delivered and self._failing:
            _logger.info("%s works again", self._what)
        elif not delivered and not self._failing:
            _logger.warning("%s fails; said once, until it works again", self._what)
        self._failing = not delivered


class _Spans(OTLPSpanExporter):
    def __init__(self, address: str, count: SpanCount) -> None:
        super().__init__(endpoint=address)
        self._collector = _Collector("traces", address)
        self._span_count = count

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        delivered = False
        try:
            result = super().export(spans)
            delivered = result is SpanExportResult.SUCCESS
            return result
        finally:
            self._span_count.done(len(spans), delivered=delivered)
            self._collector.note(delivered)


class _Metrics(OTLPMetricExporter):
    def __init__(self, address: str, histograms: Sequence[Histogram]) -> None:
        super().__init__(endpoint=address)
        self._collector = _Collector("metrics", address)
        self._histograms = histograms
        self._started = time.time_ns()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        whole = _with(metrics_data, self._histograms, self._started)
        result = super().export(whole, timeout_millis, **kwargs)
        self._collector.note(result is MetricExportResult.SUCCESS)
        return result


def _with(data: MetricsData, histograms: Sequence[Histogram], started: int) -> MetricsData:
    """Return what the SDK collected with our histograms added to its first scope."""
    now = time.time_ns()
    metrics = [_metric(each, started, now) for each in tuple(histograms)]
    if not data.resource_metrics or not metrics:
        return data
    first, *others = data.resource_metrics
    scope, *scopes = first.scope_metrics
    scope = replace(scope, metrics=[*scope.metrics, *metrics])
    return MetricsData([replace(first, scope_metrics=[scope, *scopes]), *others])


def _metric(histogram: Histogram, started: int, now: int) -> Metric:
    points = [
        HistogramDataPoint(
            attributes={name: value for name, value in read.labels.items() if value},
            start_time_unix_nano=started,
            time_unix_nano=now,
            count=read.count,
            sum=read.sum,
            bucket_counts=read.counts,
            explicit_bounds=read.bounds,
            min=read.min,
            max=read.max,
        )
        for read in histogram.read()
    ]
    return Metric(
        histogram.name,
        histogram.description,
        histogram.unit,
        HistogramData(points, AggregationTemporality.CUMULATIVE),
    )


class _BoundedProcessor(BatchSpanProcessor):
    """Drops and counts the newest span when full, where the SDK's logs and loses the oldest."""

    def __init__(self, exporter: SpanExporter, count: SpanCount) -> None:
        super().__init__(exporter)
        self._span_count = count

    def on_end(self, span: ReadableSpan) -> None:
        if span.context and span.context.trace_flags.sampled and self._span_count.admit():
            super().on_end(span)


def _positive(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}: {text!r} is not a positive integer")
    return int(text)


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
