"""One request, one trace: five real processes, exported over OTLP to a real receiver."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.testing.cluster import cluster, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRICS_EXPORTER": "none"}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans, with the role of the process that each is from."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    async def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            named = {a.key: a.value.string_value for a in group.resource.attributes}
            role = named["service.name"].removeprefix("kvmesh-")
            for scope in group.scope_spans:
                self.spans += [(role, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace: str) -> dict[tuple[str, str], Any]:
        return {
            (role, span.name.split()[0]): span
            for role, span in self.spans
            if span.trace_id.hex() == trace
        }


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, servicer = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_one_trace_covers_a_request_in_all_five_processes(tmp_path: Path) -> None:
    async with collector() as (received, endpoint):
        environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint, **QUICK}
        async with cluster(tmp_path / "state", "--engine", "sim", environ=environ) as mesh:
            async with mesh.client() as client:
                model = (await client.get("/v1/models")).json()["data"][0]["id"]
                body = {"model": model, "prompt": "a prompt that is long enough " * 9}
                headers = {"traceparent": PARENT}
                response = await client.post(
                    "/v1/completions", json={**body, "max_tokens": 4}, headers=headers
                )
                assert response.status_code == 200
            await until(lambda: len({role for role, _ in received.of(TRACE)}) == 5, 20)
        spans = received.of(TRACE)
    root = next(
        span for (role, _), span in spans.items() if span.parent_span_id.hex() == PARENT[36:52]
    )
    parents = {
        ("tokenizer", "encode"): ("frontend", "tokenize"),
        ("router", "route"): ("frontend", "route"),
        ("prefill", "engine.prefill"): ("frontend", "prefill"),
        ("decode", "engine.decode"): ("frontend", "decode"),
    }
    for child, parent in parents.items():
        assert spans[child].parent_span_id == spans[parent].span_id, child
        assert spans[parent].parent_span_id == root.span_id, parent
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans.values())
    assert not any("long enough" in str(span) for span in spans.values())
