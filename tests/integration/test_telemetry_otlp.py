"""Export to a collector: one that takes, one that refuses and one that never answers."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as MetricProto
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto

from kvmesh.config import ConfigError
from kvmesh.telemetry import Telemetry, TelemetryConfig, telemetry

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
# A process must be gone within 5 s of the end of its work.
EXIT_S = 5.0


class Collector(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.spans: dict[str, SpanProto] = {}
        self.resource: dict[str, str] = {}
        self.metrics: set[str] = set()
        self.measured: list[MetricProto] = []

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest
        | metrics_service_pb2.ExportMetricsServiceRequest,
        context: object,
    ) -> (
        trace_service_pb2.ExportTraceServiceResponse
        | metrics_service_pb2.ExportMetricsServiceResponse
    ):
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for group in request.resource_spans:
                for attribute in group.resource.attributes:
                    self.resource[attribute.key] = attribute.value.string_value
                for scope in group.scope_spans:
                    self.spans |= {span.name: span for span in scope.spans}
            return trace_service_pb2.ExportTraceServiceResponse()
        for measured in request.resource_metrics:
            for of_scope in measured.scope_metrics:
                self.metrics |= {metric.name for metric in of_scope.metrics}
                self.measured += of_scope.metrics
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server = grpc.aio.server()
    servicer = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextmanager
def refusing() -> Iterator[str]:
    """Yield an endpoint nobody listens on: bound, so that nobody else takes it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield an endpoint that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def opened(environ: Mapping[str, str]) -> AbstractAsyncContextManager[Telemetry]:
    return telemetry(TelemetryConfig(), role="decode", epoch="e1", environ=environ)


async def dropped(process: Telemetry) -> float:
    text = (await asyncio.to_thread(process.render)).decode()
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("kvmesh_telemetry_dropped_spans_total ")
    ]
    return float(line.split()[1])


async def test_a_collector_gets_spans_and_metrics_at_the_latest_at_exit() -> None:
    async with collector() as (received, address):
        async with opened({"OTEL_EXPORTER_OTLP_ENDPOINT": address}) as process:
            process.meter.counter("kvmesh_requests", "Requests.").add()
            with process.tracer.span("decode", PARENT) as span:
                span.child("kv pull", {"bytes": 5}).end()
        outer, inner = received.spans["decode"], received.spans["kv pull"]
        assert outer.trace_id == inner.trace_id == bytes.fromhex(PARENT[3:35])
        assert outer.parent_span_id == bytes.fromhex(PARENT[36:52])
        assert inner.parent_span_id == outer.span_id
        assert received.resource["service.name"] == "kvmesh-decode"
        assert received.resource["service.instance.id"] == "e1"
        assert {"kvmesh_requests", "kvmesh_telemetry_dropped_spans"} <= received.metrics


async def test_a_collector_gets_histograms_whole() -> None:
    async with (
        collector() as (received, address),
        opened({"OTEL_EXPORTER_OTLP_ENDPOINT": address}) as process,
    ):
        histogram = process.meter.histogram(
            "gen_ai.client.token.usage",
            "Tokens.",
            labels=("model", "error.type"),
            unit="{token}",
            buckets=(1, 4),
        )
        for value in (1, 3, 9):
            histogram.record(value, model="m", **{"error.type": ""})
    (metric,) = [m for m in received.measured if m.name == "gen_ai.client.token.usage"]
    (point,) = metric.histogram.data_points
    assert metric.unit == "{token}"
    assert metric.histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert list(point.explicit_bounds) == [1, 4]
    assert list(point.bucket_counts) == [1, 1, 1]
    assert (point.count, point.sum, point.min, point.max) == (3, 13, 1, 9)
    assert [(a.key, a.value.string_value) for a in point.attributes] == [("model", "m")]
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano


async def test_each_signal_may_go_elsewhere_or_nowhere() -> None:
    async with collector() as (received, address):
        environ = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": address,
            "OTEL_SERVICE_NAME": "mine",
        }
        async with opened(environ) as process:
            process.tracer.span("only traces").end()
        assert set(received.spans) == {"only traces"}
        assert received.resource["service.name"] == "mine"
        assert received.metrics == set()
        off = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_TRACES_EXPORTER": "none"}
        async with opened(off) as process:
            process.tracer.span("unseen").end()
        assert set(received.spans) == {"only traces"}
        assert "kvmesh_telemetry_dropped_spans" not in received.metrics
        assert received.metrics == set()


@pytest.mark.parametrize("broken", [refusing, black_hole])
async def test_a_broken_collector_delays_nothing_and_is_told_of_once(
    broken: Callable[[], AbstractContextManager[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with broken() as address, caplog.at_level(logging.INFO):
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_BSP_MAX_QUEUE_SIZE": "512"}
        async with AsyncExitStack() as stack:
            process = await stack.enter_async_context(opened(environ))
            for _ in range(1_000):
                process.tracer.span("request").end()
            assert await dropped(process) >= 1_000 - 512
            async with asyncio.timeout(EXIT_S):
                await stack.aclose()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "traces" in line]) == 1
    assert len([line for line in lines if "metrics" in line]) == 1
    assert len(lines) == 2
    assert await dropped(process) == 1_000


async def test_settings_that_cannot_be_followed_are_named() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: 'http/protobuf'"):
        async with opened(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            }
        ):
            pass
    with pytest.raises(ConfigError, match="OTEL_BSP_MAX_QUEUE_SIZE: '-1'"):
        async with opened(
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_BSP_MAX_QUEUE_SIZE": "-1",
            }
        ):
            pass
