"""Five real processes seen from outside: their traces, their metrics and their logs."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.testing.cluster import Cluster, cluster, until

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


def logs_of(mesh: Cluster) -> str:
    return "".join(path.read_text(errors="replace") for path in mesh.state.rglob("*.log"))


async def model_of(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def pages_of(mesh: Cluster) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        found = [p["metrics_address"] for p in await mesh.status()]
        return "".join([(await client.get(f"http://{at}/metrics")).text for at in found])


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
    http, root = spans["frontend", "POST"], spans["frontend", "text_completion"]
    assert http.parent_span_id.hex() == PARENT[36:52]
    assert root.parent_span_id == http.span_id
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


CANARY = "Zxqcanaryqxz"


async def test_prompts_are_in_no_log_no_span_and_no_metric_of_any_process(tmp_path: Path) -> None:
    async with collector() as (received, endpoint):
        environ = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
            "KVMESH_TELEMETRY_LOG_LEVEL": "debug",
            **QUICK,
        }
        async with cluster(tmp_path / "state", "--engine", "sim", environ=environ) as mesh:
            async with mesh.client() as client:
                model = await model_of(client)
                headers = {"traceparent": PARENT, "x-request-id": CANARY, "user-agent": CANARY}
                for more in (
                    {"prompt": f"{CANARY} " * 40, "stop": [CANARY], "user": CANARY},
                    {"prompt": {CANARY: CANARY}},
                    {"prompt": CANARY, CANARY: CANARY},
                    {"prompt": CANARY, "temperature": CANARY},
                    {"prompt": f"{CANARY} " * 90_000},
                    {"prompt": CANARY, "model": CANARY},
                ):
                    body = {"model": model, "max_tokens": 4, **more}
                    response = await client.post("/v1/completions", json=body, headers=headers)
                    assert response.status_code < 500, response.text
                await client.get(f"/{CANARY}", headers=headers)
            await until(lambda: len({role for role, _ in received.of(TRACE)}) == 5, 20)
            pages = await pages_of(mesh)
            logged = logs_of(mesh)
        spans = str(received.spans)
    assert "DEBUG" in logged
    for text in (logged, pages, spans):
        assert text
        assert CANARY not in text, text[max(0, text.find(CANARY) - 300) :][:400]


async def test_a03_a_killed_decode_worker_counts_as_an_error(tmp_path: Path) -> None:
    paced = ("--set", "engine.sim.latency.decode_us_per_step=20000")
    async with cluster(tmp_path / "state", "--engine", "sim", *paced) as mesh:
        (frontend,) = await mesh.of("frontend")
        async with mesh.client() as client:
            body = {"model": await model_of(client), "prompt": "x", "max_tokens": 500}
            async with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                lines = response.aiter_lines()
                for _ in range(10):
                    await anext(lines)
                for worker in await mesh.of("decode"):
                    os.kill(worker["pid"], signal.SIGKILL)
                rest = [line async for line in lines]
        assert not any("[DONE]" in line for line in rest)
        assert any('"error"' in line for line in rest)
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"http://{frontend['metrics_address']}/metrics")).text
    wanted = f'model="{body["model"]}"'
    errors = [line for line in page.splitlines() if line.startswith("kvmesh_request_errors_total{")]
    assert [line for line in errors if wanted in line and line.endswith(" 1.0")], errors
    assert 'finish_reason="error"' in page


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


@pytest.mark.parametrize("broken", [refusing, black_hole])
async def test_a60_a_broken_collector_changes_nothing(
    broken: Callable[[], AbstractContextManager[str]], tmp_path: Path
) -> None:
    with broken() as endpoint:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }
        async with cluster(tmp_path / "state", "--engine", "sim", environ=environ) as mesh:
            async with mesh.client() as client:
                model = await model_of(client)
                slots = asyncio.Semaphore(50)

                async def ask(number: int) -> int:
                    body = {"model": model, "prompt": f"{number}", "max_tokens": 4}
                    async with slots:
                        return (await client.post("/v1/completions", json=body)).status_code

                statuses = await asyncio.gather(*map(ask, range(1_000)))
            assert set(statuses) == {200}
            processes = await mesh.status()
            dropped = [
                (await mesh.metrics(p))["kvmesh_telemetry_dropped_spans_total"] for p in processes
            ]
            assert any(dropped) or broken is black_hole
            for process in processes:
                os.kill(process["pid"], signal.SIGTERM)
            await until(lambda: not any(map(alive, (p["pid"] for p in processes))), EXIT_SECONDS)
            logged = logs_of(mesh)
    for signal_name in ("traces", "metrics"):
        assert 1 <= logged.count(f"export of {signal_name} to") <= len(processes)
    assert "StatusCode.UNAVAILABLE" not in logged
    assert "Traceback" not in logged


EXIT_SECONDS = 5.0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
