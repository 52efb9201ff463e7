"""Opens a process's telemetry, in one place, as its settings and OTEL_* variables say."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

from kvmesh.telemetry.exposition import Exposition, serve_metrics
from kvmesh.telemetry.histogram import Histogram
from kvmesh.telemetry.metrics import Meter
from kvmesh.telemetry.otlp import endpoint, exported_metrics, exported_traces, tracer_to
from kvmesh.telemetry.trace import Tracer


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What a process tells about itself. Where traces go is up to the OTEL_* variables."""

    log_level: str = field(
        default="info",
        metadata={
            "help": "least level that is logged",
            "choices": ("debug", "info", "warning", "error", "critical"),
        },
    )
    log_json: bool = field(default=False, metadata={"help": "log JSON objects, one a line"})
    log_messages: bool = field(
        default=False,
        metadata={"help": "log the messages of unexpected exceptions, too: they may quote prompts"},
    )
    metrics_host: str = field(
        default="127.0.0.1", metadata={"help": "address that /metrics is served on"}
    )
    metrics_port: int = field(
        default=0, metadata={"help": "its port; 0 takes a free one", "min": 0, "max": 65535}
    )


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a process traces and measures with.

    `metrics_address` is the `host:port` that serves /metrics, "" where none does.
    `render` returns the same text, for a process that serves it on a port of its own.
    """

    tracer: Tracer
    meter: Meter
    metrics_address: str
    render: Callable[[], bytes]


@asynccontextmanager
async def telemetry(
    config: TelemetryConfig, role: str, epoch: str, environ: Mapping[str, str]
) -> AsyncIterator[Telemetry]:
    """Open a process's telemetry; leaving sends what is left and takes at most 5 s.

    Traces and metrics go to a collector over OTLP/gRPC if `environ` has an endpoint for
    it (OTEL_EXPORTER_OTLP_ENDPOINT or the one of the signal). The other OTEL_* variables
    are read by the OpenTelemetry SDK itself. The exporters hold gRPC channels, which don't
    survive a fork: start what forks before. Raises ConfigError for settings it can't
    follow, a metrics port in use among them.
    """
    resource = _resource(role, epoch, environ)
    histograms: list[Histogram] = []
    exposition = Exposition(histograms)
    async with AsyncExitStack() as stack:
        readers: list[MetricReader] = [exposition.reader]
        if address := endpoint(environ, "METRICS"):
            exported = exported_metrics(address, environ, histograms)
            readers.append(await stack.enter_async_context(exported))
        meter = _meter(readers, resource, histograms)
        tracer = Tracer()
        if address := endpoint(environ, "TRACES"):
            tracer, count = await stack.enter_async_context(
                exported_traces(address, resource, environ)
            )
            meter.counter_from(
                "kvmesh_telemetry_dropped_spans",
                "Spans that did not reach the collector.",
                lambda: count.dropped,
            )
        served = stack.enter_context(
            serve_metrics(config.metrics_host, config.metrics_port, exposition.render)
        )
        yield Telemetry(tracer, meter, served, exposition.render)


def quiet_telemetry(spans: SpanExporter | SpanProcessor | None = None) -> Telemetry:
    """Return telemetry without sockets or threads, which nobody needs to close.

    For tests and tools. Spans go to `spans` as they end, to a processor also as they start.
    """
    resource = Resource.get_empty()
    histograms: list[Histogram] = []
    exposition = Exposition(histograms)
    tracer = Tracer()
    if isinstance(spans, SpanExporter):
        spans = SimpleSpanProcessor(spans)
    if spans is not None:
        tracer = tracer_to(spans, resource)
    meter = _meter([exposition.reader], resource, histograms)
    return Telemetry(tracer, meter, "", exposition.render)


def _meter(readers: list[MetricReader], resource: Resource, histograms: list[Histogram]) -> Meter:
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    return Meter(provider.get_meter("kvmesh"), histograms)


def _resource(role: str, epoch: str, environ: Mapping[str, str]) -> Resource:
    return Resource.create(
        {
            "service.name": environ.get("OTEL_SERVICE_NAME") or f"kvmesh-{role}",
            "service.instance.id": epoch,
            "service.version": _version(),
        }
    )


def _version() -> str:
    try:
        return version("kvmesh")
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return "unknown"
