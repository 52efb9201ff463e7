"""Spans of a frontend end once, whatever becomes of the request, and say what became of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from kvmesh.errors import MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.calls import BatchCall
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.specs import GENERATE
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL, FakeDecode
from kvmesh.testing.http import connected
from kvmesh.testing.spans import SpanLedger
from kvmesh.types import FinishReason, Worker
from kvmesh.v1 import inference_pb2, inference_pb2_grpc
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig

TEXT = "/v1/completions"
HTTP = f"POST {TEXT}"
ROOT = f"text_completion {MODEL}"
BODY = {"model": MODEL, "prompt": "tell me", "max_tokens": 100}


@asynccontextmanager
async def traced(
    *, seconds: float = 60.0, remote: bool = True
) -> AsyncIterator[tuple[FakeMesh, SpanLedger]]:
    ledger = SpanLedger()
    config = FrontendConfig(http=HttpConfig(port=0), limits=LimitsConfig(request_seconds=seconds))
    async with fake_mesh(app, config, remote=remote, spans=ledger) as mesh:
        yield mesh, ledger
        await mesh.gone()
    assert ledger.open == []


async def ask(mesh: FakeMesh, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False, timeout=20) as client:
        return await client.post(TEXT, json={**BODY, **more}, headers=headers)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def why(span: ReadableSpan) -> tuple[str | None, str | None]:
    """Return a span's `error.type` and, if it failed, its description."""
    kind = attributes(span).get("error.type")
    assert (span.status.status_code is StatusCode.ERROR) == (kind is not None)
    return kind, span.status.description


async def settled(mesh: FakeMesh, ledger: SpanLedger) -> None:
    await mesh.gone()
    await mesh.tokenizer.until(lambda: not ledger.open)


async def test_a_complete_answer_has_its_figures() -> None:
    async with traced() as (mesh, ledger):
        await ask(mesh, temperature=0.5, top_p=0.9, seed=7)
        await settled(mesh, ledger)
    assert ledger.names == sorted([HTTP, ROOT, "tokenize", "route", "prefill", "decode"])
    assert all(why(span) == (None, None) for span in ledger.ended)
    http, root = ledger.named(HTTP), ledger.named(ROOT)
    assert http.kind is SpanKind.SERVER
    assert attributes(http) == {
        "http.request.method": "POST",
        "http.route": TEXT,
        "http.response.status_code": 200,
    }
    assert root.parent is not None
    assert http.context is not None
    assert root.parent.span_id == http.context.span_id
    got = attributes(root)
    assert got.pop("kvmesh.request_id")
    assert got == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvmesh",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.output.type": "text",
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 13,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ("stop",),
    }


async def test_a_stop_string_ends_with_what_was_read() -> None:
    async with traced(remote=False) as (mesh, ledger):
        mesh.decode.script = fakes.babble
        response = await ask(mesh, stop=["ld!"])
        await settled(mesh, ledger)
    used = response.json()["usage"]["completion_tokens"]
    got = attributes(ledger.named(ROOT))
    assert got["gen_ai.usage.output_tokens"] == used
    assert got["gen_ai.response.finish_reasons"] == ("stop",)
    assert "ld!" not in ledger.text()


async def test_several_answers_are_one_request() -> None:
    async with traced(remote=False) as (mesh, ledger):
        await ask(mesh, n=2, prompt=["a", "b"])
        await settled(mesh, ledger)
    assert ledger.names.count("decode") == 4
    assert ledger.names.count("tokenize") == 2
    got = attributes(ledger.named(ROOT))
    assert got["gen_ai.request.choice.count"] == 4
    assert got["gen_ai.usage.input_tokens"] == 2
    assert got["gen_ai.usage.output_tokens"] == 4 * 13
    assert got["gen_ai.response.finish_reasons"] == ("stop",) * 4


@pytest.mark.parametrize(
    ("body", "status", "names", "reason"),
    [
        ({"n": 0}, 400, [HTTP], None),
        ({"model": "x" * 50}, 404, [HTTP, "text_completion other"], "UNKNOWN_MODEL"),
        ({"max_tokens": 99_999}, 400, [HTTP, ROOT, "tokenize"], "CONTEXT_LENGTH_EXCEEDED"),
        ({"n": 999}, 400, [HTTP], None),
    ],
)
async def test_a48_what_is_refused_is_traced_with_its_status(
    body: dict[str, Any], status: int, names: list[str], reason: str | None
) -> None:
    async with traced() as (mesh, ledger):
        response = await ask(mesh, **body)
        assert response.status_code == status
        await settled(mesh, ledger)
        assert ledger.names == sorted(names)
        http = ledger.named(HTTP)
        assert attributes(http)["http.response.status_code"] == status
        # The caller's mistake, so not the server's error.
        assert why(http) == (None, None)
        if reason is not None:
            # Said to the caller, and not repeated here: it may quote him.
            root = next(span for span in ledger.ended if span.name.startswith("text_completion"))
            assert why(root) == (reason, None)
        assert "xxxx" not in ledger.text()


async def test_what_is_no_route_is_traced_without_its_path() -> None:
    async with traced() as (mesh, ledger):
        async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
            assert (await client.get("/a/secret")).status_code == 404
            assert (await client.request("PROPFIND", "/v1/completions")).status_code == 405
            assert (await client.get("/health")).status_code == 200
        await settled(mesh, ledger)
    assert ledger.names == ["GET", "_OTHER /v1/completions"]
    assert "secret" not in ledger.text()


async def test_an_error_before_the_first_byte_is_a_server_error() -> None:
    async with traced() as (mesh, ledger):
        mesh.router.refuses = OverloadedError("full")
        assert (await ask(mesh)).status_code == 429
        mesh.router.refuses = UnavailableError("nobody")
        assert (await ask(mesh)).status_code == 503
        await settled(mesh, ledger)
    first, second = (span for span in ledger.ended if span.name == ROOT)
    assert why(first) == ("OVERLOADED", "full")
    assert why(second) == ("UNAVAILABLE", "nobody")
    first, second = (span for span in ledger.ended if span.name == HTTP)
    assert why(first) == (None, None)
    assert why(second) == ("503", None)


async def test_an_error_after_the_first_byte_is_the_requests_own() -> None:
    async with traced(remote=False) as (mesh, ledger):
        mesh.decode.script = fakes.die_later
        async with (
            httpx.AsyncClient(base_url=mesh.url, trust_env=False, timeout=20) as client,
            client.stream("POST", TEXT, json={**BODY, "stream": True}) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            mesh.decode.gate.set()
            rest = [line async for line in lines]
        assert any('"error"' in line for line in rest)
        await settled(mesh, ledger)
    root = ledger.named(ROOT)
    assert why(root) == ("UNAVAILABLE", "the worker is going away")
    assert attributes(root)["gen_ai.usage.output_tokens"] == 5
    assert attributes(ledger.named(HTTP))["http.response.status_code"] == 200


async def test_each_attempt_has_its_spans() -> None:
    async with traced() as (mesh, ledger):
        mesh.prefill.refuses = UnavailableError("gone")
        assert (await ask(mesh)).status_code == 200
        await settled(mesh, ledger)
    failed = ledger.named("prefill")
    assert why(failed) == ("UNAVAILABLE", "gone")
    assert ledger.names.count("route") == 2
    root = ledger.named(ROOT)
    assert why(root) == (None, None)
    assert [event.name for event in root.events] == ["retry", "first_token"]


STAGES = ["tokenize", "route", "prefill", "decode"]


def hold(mesh: FakeMesh, stage: str) -> asyncio.Event:
    """Make a stage wait; return what lets it go on."""
    if stage == "tokenize":
        mesh.tokenizer.hold = asyncio.Event()
        return mesh.tokenizer.hold
    if stage == "route":
        mesh.router.hold = True
        return asyncio.Event()
    if stage == "prefill":
        mesh.prefill.hold = asyncio.Event()
        return mesh.prefill.hold
    mesh.decode.script = fakes.stall
    return mesh.decode.gate


def begun(mesh: FakeMesh, stage: str) -> bool:
    fake: Any = {
        "tokenize": mesh.tokenizer,
        "route": mesh.router,
        "prefill": mesh.prefill,
        "decode": mesh.decode,
    }[stage]
    return bool(fake.starts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_ends_the_spans_of_its_stage(stage: str, stream: bool) -> None:
    async with traced() as (mesh, ledger):
        go_on = hold(mesh, stage)
        address = mesh.url.removeprefix("http://")
        async with connected(address) as raw:
            raw.post(TEXT, {**BODY, "stream": stream})
            await mesh.decode.until(lambda: begun(mesh, stage))
        await settled(mesh, ledger)
        go_on.set()
        for name in (HTTP, ROOT, stage):
            assert why(ledger.named(name)) == ("CANCELLED", None)
        done = STAGES[: STAGES.index(stage)]
        assert all(why(ledger.named(name)) == (None, None) for name in done)
        assert "http.response.status_code" not in attributes(ledger.named(HTTP))


@pytest.mark.parametrize("stage", STAGES)
async def test_a_deadline_ends_the_spans_of_its_stage(stage: str) -> None:
    async with traced(seconds=1.5) as (mesh, ledger):
        go_on = hold(mesh, stage)
        for fake in (mesh.tokenizer, mesh.router, mesh.prefill, mesh.decode):
            fake.ignores_deadlines = True
        assert (await ask(mesh)).status_code == 504
        await settled(mesh, ledger)
        go_on.set()
        assert why(ledger.named(ROOT))[0] == "DEADLINE_EXCEEDED"
        assert why(ledger.named(stage))[0] == "DEADLINE_EXCEEDED"
        assert why(ledger.named(HTTP)) == ("504", None)


async def test_a_drain_refuses_with_a_span_and_lets_the_running_end() -> None:
    async with traced(remote=False) as (mesh, ledger):
        mesh.decode.script = fakes.stall
        running = asyncio.create_task(ask(mesh))
        await mesh.decode.until(lambda: mesh.decode.live == 1)
        mesh.frontend.process.gate.close()
        assert (await ask(mesh)).status_code == 503
        mesh.decode.gate.set()
        assert (await running).status_code == 200
        await settled(mesh, ledger)
    refused, served = (span for span in ledger.ended if span.name == HTTP)
    assert why(refused) == ("503", None)
    assert why(served) == (None, None)


async def test_a_cut_off_drain_ends_every_span() -> None:
    async with traced(remote=False) as (mesh, ledger):
        mesh.decode.script = fakes.stall
        running = asyncio.create_task(ask(mesh))
        await mesh.decode.until(lambda: mesh.decode.live == 1)
        assert not await mesh.frontend.drain(0.05)
        await asyncio.gather(running, return_exceptions=True)
        assert ledger.open == []


async def test_a_failure_of_ours_is_named_and_not_quoted() -> None:
    async def broken(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        raise RuntimeError("tell me")

    async with traced(remote=False) as (mesh, ledger):
        mesh.decode.script = broken
        assert (await ask(mesh)).status_code == 500
        await settled(mesh, ledger)
    assert why(ledger.named(ROOT)) == ("INTERNAL", "internal error")
    assert "tell me" not in ledger.text()


@pytest.mark.parametrize("rpc", ["Generate", "StreamGenerate", "MultiplexGenerate"])
async def test_requests_over_grpc_have_their_rpc_and_its_status(rpc: str) -> None:
    async with traced(remote=False) as (mesh, ledger), over_grpc(mesh) as ask_by:
        mesh.router.refuses = OverloadedError("full")
        with pytest.raises((MeshError, grpc.aio.AioRpcError)):
            await ask_by(rpc, MODEL)
        mesh.router.refuses = None
        await ask_by(rpc, MODEL)
        with pytest.raises((MeshError, grpc.aio.AioRpcError)):
            await ask_by(rpc, "")
        await settled(mesh, ledger)
    name = f"kvmesh.v1.InferenceService/{rpc}"
    failed, served, refused = (span for span in ledger.ended if span.name == name)
    assert why(failed) == ("OVERLOADED", "full")
    assert attributes(failed)["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert why(served) == (None, None)
    assert attributes(served)["rpc.response.status_code"] == "OK"
    assert why(refused) == ("INVALID_ARGUMENT", None)
    assert attributes(refused)["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert {span.kind for span in (failed, served, refused)} == {SpanKind.SERVER}


Asks = Callable[[str, str], Awaitable[object]]


@asynccontextmanager
async def over_grpc(mesh: FakeMesh) -> AsyncIterator[Asks]:
    member = mesh.frontend.member
    peer = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
    stub: Any = inference_pb2_grpc.InferenceServiceStub(peer.channel)

    async def ask_by(rpc: str, model: str) -> object:
        fields: dict[str, Any] = {
            "model": f"models/{model}",
            "input": inference_pb2.GenerateInput(text="hi"),
        }
        if rpc == "Generate":
            return await stub.Generate(inference_pb2.GenerateRequest(**fields))
        if rpc == "StreamGenerate":
            request = inference_pb2.StreamGenerateRequest(**fields)
            return [response async for response in stub.StreamGenerate(request)]
        call: BatchCall[str] = BatchCall(peer.stream(GENERATE), lambda delta: delta.text)
        call.request.starts.add(stream_id=call.stream_id, **fields)
        async with asyncio.timeout(10):
            while (await call.next())[1] is None:
                pass
        return call

    try:
        yield ask_by
    finally:
        await peer.aclose()


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"


@pytest.mark.parametrize(
    "bad",
    [
        "x",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        f"{PARENT}-01-more",
        "ff" + PARENT[2:] + "-01",
        "0" * 7_000,
        "01" + PARENT[2:] + "-01-" + "9" * 7_000,
    ],
)
async def test_a48_a_malformed_parent_begins_a_new_trace(bad: str) -> None:
    async with traced(remote=False) as (mesh, ledger):
        assert (await ask(mesh, headers={"traceparent": bad})).status_code == 200
        await settled(mesh, ledger)
    http = ledger.named(HTTP)
    assert http.parent is None
    assert len({span.context.trace_id for span in ledger.ended if span.context}) == 1


async def test_a48_100_kb_of_parent_are_refused_by_http_itself_or_passed_over() -> None:
    async with traced(remote=False) as (mesh, ledger):
        headers = {"traceparent": "0" * 100_000}
        try:
            response = await ask(mesh, headers=headers)
        except httpx.TransportError:
            pass
        else:
            assert response.status_code in (200, 400, 431)
        assert (await ask(mesh)).status_code == 200
        await settled(mesh, ledger)
        assert "0" * 64 not in ledger.text()


async def test_a48_a_parent_that_is_not_sampled_is_followed_and_not_recorded() -> None:
    async with traced(remote=False) as (mesh, ledger):
        headers = {"traceparent": f"{PARENT}-00"}
        assert (await ask(mesh, headers=headers)).status_code == 200
        await settled(mesh, ledger)
        assert ledger.ended == []
        (start,) = mesh.decode.starts
        assert start.context.traceparent[3:35] == PARENT[3:35]
        assert start.context.traceparent.endswith("-00")


async def test_a48_requests_of_one_stream_keep_their_own_parents() -> None:
    count = 40
    parents = [f"00-{number:032x}-{number:016x}-01" for number in range(1, count + 1)]
    async with traced() as (mesh, ledger):
        async with httpx.AsyncClient(base_url=mesh.url, trust_env=False, timeout=20) as client:
            answers = await asyncio.gather(
                *(client.post(TEXT, json=BODY, headers={"traceparent": p}) for p in parents)
            )
        assert {answer.status_code for answer in answers} == {200}
        await settled(mesh, ledger)
        for fake in (mesh.tokenizer, mesh.router, mesh.prefill, mesh.decode):
            asked = [start.context.traceparent[3:35] for start in fake.starts]
            assert sorted(asked) == [f"{number:032x}" for number in range(1, count + 1)]
    by_id = {span.context.span_id: span for span in ledger.ended if span.context}
    for span in ledger.ended:
        assert span.context is not None
        assert span.parent is not None
        assert span.parent.trace_id == span.context.trace_id
        if span.name == HTTP:
            assert span.parent.span_id == span.context.trace_id
        else:
            above = by_id[span.parent.span_id]
            assert above.name == (HTTP if span.name == ROOT else ROOT)
