"""The life of a request among fake services, over real gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvmesh.errors import (
    InvalidRequestError,
    OverloadedError,
    TicketError,
    TransferError,
    UnavailableError,
)
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fake_tokenizer import FakeTokenizer
from kvmesh.testing.fakes import MODEL, FakeDecode
from kvmesh.types import FinishReason
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig


def config(request_seconds: float = 60.0) -> FrontendConfig:
    return FrontendConfig(
        http=HttpConfig(port=0), limits=LimitsConfig(request_seconds=request_seconds)
    )


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, config()) as running:
        yield running


@pytest.fixture
async def apart() -> AsyncIterator[FakeMesh]:
    """Prefill and decode apart, two of each."""
    async with fake_mesh(app, config(), prefills=2, decodes=2, remote=True) as running:
        yield running


def client_of(mesh: FakeMesh) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=mesh.url, verify=False, trust_env=False)


async def ask(mesh: FakeMesh, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "tell me", "max_tokens": 100, **more}
    async with client_of(mesh) as client:
        return await client.post("/v1/completions", json=body, timeout=20)


@asynccontextmanager
async def streaming(mesh: FakeMesh, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
    async with (
        client_of(mesh) as client,
        client.stream("POST", "/v1/completions", json=body, timeout=20) as response,
        aclosing(response.aiter_lines()) as lines,
    ):
        yield lines


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def metric(mesh: FakeMesh, name: str) -> float:
    page = mesh.frontend.process.telemetry.render().decode()
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_local_prefill_goes_to_decode_alone(mesh: FakeMesh) -> None:
    response = await ask(mesh)
    assert text(response) == "Hello, world!"
    assert response.json()["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 13,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    (start,) = mesh.router.starts
    assert start.prompt_tokens == 7
    assert start.max_tokens == 100
    assert start.block_size == 16
    await mesh.idle()
    assert mesh.router.prefilled == [1]
    assert not mesh.prefill.starts


async def test_remote_prefill_hands_its_ticket_and_first_token_on(apart: FakeMesh) -> None:
    apart.prefill.first = [ord(">")]
    response = await ask(apart)
    assert text(response) == ">Hello, world!"
    usage = response.json()["usage"]
    assert usage["completion_tokens"] == 14
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    (start,) = apart.decode.starts
    assert start.ticket.ticket_id == "ticket-1"
    assert list(start.token_ids) == list(b"tell me")
    await apart.idle()
    assert apart.router.prefilled == [1]
    assert apart.prefill.released == []


async def test_first_token_is_sent_before_decode_begins(apart: FakeMesh) -> None:
    apart.prefill.first = [ord(">")]
    apart.decode.script = fakes.stall
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with streaming(apart, body) as lines:
        assert '"text":">"' in await anext(lines)
        apart.decode.gate.set()
        assert [line async for line in lines][-2] == "data: [DONE]"


async def test_answer_complete_at_prefill_needs_no_decode(apart: FakeMesh) -> None:
    apart.prefill.first = [ord("!")]
    apart.prefill.finish = FinishReason.LENGTH
    response = await ask(apart, max_tokens=1)
    assert text(response) == "!"
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 1
    assert not apart.decode.starts
    await apart.idle()


async def test_no_router_falls_back_to_discovered_workers() -> None:
    async with fake_mesh(app, config(), decodes=2, router=False) as mesh:
        for decode in mesh.decodes:
            decode.script = fakes.stall
        asks = [asyncio.create_task(ask(mesh)) for _ in range(4)]
        await mesh.decodes[1].until(lambda: mesh.decodes[1].live == 2)
        await mesh.decodes[0].until(lambda: mesh.decodes[0].live == 2)
        for decode in mesh.decodes:
            decode.gate.set()
        assert [text(await one) for one in asks] == ["Hello, world!"] * 4
        assert metric(mesh, "kvmesh_fallbacks_total") == 4


async def test_router_that_dies_is_passed_over(mesh: FakeMesh) -> None:
    assert text(await ask(mesh)) == "Hello, world!"
    await mesh.node(mesh.router).stop()
    assert text(await ask(mesh)) == "Hello, world!"
    assert metric(mesh, "kvmesh_fallbacks_total") == 1


async def test_refusal_of_the_router_is_the_answer(mesh: FakeMesh) -> None:
    mesh.router.refuses = OverloadedError("the queue is full", retry_after=3)
    response = await ask(mesh)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert not mesh.decode.starts
    await mesh.idle()


@pytest.mark.parametrize("script", [fakes.die, None])
async def test_decode_that_fails_before_the_first_token_is_replaced(
    apart: FakeMesh, script: fakes.Script | None
) -> None:
    first, second = apart.decodes
    if script is None:
        first.refuses = OverloadedError("full")
    else:
        first.script = script
    assert text(await ask(apart)) == "Hello, world!"
    assert len(second.starts) == 1
    assert list(apart.router.starts[1].excluded_worker_ids) == [apart.node(first).member.id]
    await apart.idle()
    # The refused ticket was given back, the second one was used.
    await apart.prefill.until(lambda: apart.prefill.released == ["ticket-1"])
    assert second.starts[0].ticket.ticket_id == "ticket-2"
    assert metric(apart, "kvmesh_retries_total") == 1


@pytest.mark.parametrize("error", [TicketError("stale"), TransferError("the pull failed")])
async def test_kv_that_cannot_be_pulled_is_computed_elsewhere(
    apart: FakeMesh, error: Exception
) -> None:
    async def pull_fails(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        if start.HasField("ticket"):
            raise error
        return await fakes.say(fake, start, emit)

    apart.decode.script = pull_fails
    assert text(await ask(apart)) == "Hello, world!"
    # Another prefill worker, then decode by itself; always the same, healthy, decode.
    assert [len(prefill.starts) for prefill in apart.prefills] == [1, 1]
    assert [len(decode.starts) for decode in apart.decodes] == [3, 0]
    await apart.idle()


async def test_a51_prefill_that_fails_is_replaced_then_done_without(apart: FakeMesh) -> None:
    for prefill in apart.prefills:
        prefill.refuses = UnavailableError("gone")
    assert text(await ask(apart)) == "Hello, world!"
    assert [len(prefill.starts) for prefill in apart.prefills] == [1, 1]
    assert not apart.decode.starts[0].HasField("ticket")
    assert metric(apart, "kvmesh_retries_total") == 2
    await apart.idle()


async def test_a51_attempts_are_bounded_and_the_first_cause_is_told() -> None:
    async with fake_mesh(app, config(), decodes=5) as mesh:
        for decode in mesh.decodes:
            decode.script = fakes.die
        response = await ask(mesh)
        assert response.status_code == 503
        assert "going away" in response.json()["error"]["message"]
        assert sum(len(decode.starts) for decode in mesh.decodes) == 3
        await mesh.idle()


async def test_when_nobody_is_left_the_workers_own_error_is_told(mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.die
    response = await ask(mesh)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the worker is going away"
    await mesh.idle()


async def test_decode_that_fails_after_its_first_token_is_gone_on_from(apart: FakeMesh) -> None:
    first, second = apart.decodes
    first.script = fakes.die_later
    asking = asyncio.create_task(ask(apart))
    await first.until(lambda: first.live == 1)
    await apart.router.until(lambda: len(apart.router.prefilled) == 1)
    first.gate.set()
    response = await asking
    assert text(response) == "Hello, world!"
    assert response.json()["usage"]["completion_tokens"] == 13
    (start,) = second.starts
    assert list(start.token_ids) == list(b"tell me")
    assert bytes(start.generated_token_ids) == b"Hello"
    assert not start.HasField("ticket")  # it computes the prompt by itself
    planned = apart.router.starts[1]
    assert (planned.prompt_tokens, planned.max_tokens) == (12, 95)
    assert list(planned.excluded_worker_ids) == [apart.node(first).member.id]
    await apart.idle()
    assert apart.prefill.released == []
    assert metric(apart, "kvmesh_migrations_total") == 1
    assert metric(apart, 'kvmesh_requests_total{model="fake-model",outcome="ok"}') == 1


async def test_decode_worker_that_dies_mid_stream_is_not_noticed(apart: FakeMesh) -> None:
    first = apart.decode
    first.script = fakes.babble
    body = {"model": MODEL, "prompt": "x", "stream": True, "logprobs": 1}
    async with streaming(apart, body) as lines:
        seen = [await anext(lines)]
        await apart.node(first).kill()
        seen += [line async for line in lines]
    assert "error" not in "".join(seen)
    assert seen[-2] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "Hello, world!"
    told = [event["choices"][0]["logprobs"] for event in events]
    assert "".join(t for each in told if each for t in each["tokens"]) == "Hello, world!"
    await apart.idle()


async def test_kv_that_cannot_be_pulled_after_the_first_token_is_computed_by_decode(
    apart: FakeMesh,
) -> None:
    async def pull_fails(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        if start.HasField("ticket"):
            raise TransferError("the pull failed")
        return await fakes.say(fake, start, emit)

    apart.prefill.first = [ord("H")]
    apart.decode.script = pull_fails
    assert text(await ask(apart)) == "Hello, world!"
    assert [bytes(start.generated_token_ids) for start in apart.decode.starts] == [b"", b"H"]
    await apart.idle()


async def test_going_on_is_bounded_too() -> None:
    async with fake_mesh(app, config(), decodes=5) as mesh:
        for decode in mesh.decodes:
            decode.script = fakes.die_later
            decode.gate.set()
        response = await ask(mesh)
        assert response.status_code == 503
        assert sum(len(decode.starts) for decode in mesh.decodes) == 3
        await mesh.idle()


async def test_what_is_wrong_with_a_request_is_told_whoever_failed_before(apart: FakeMesh) -> None:
    first, second = apart.decodes
    first.refuses = OverloadedError("full")
    second.refuses = InvalidRequestError("no such token", field="prompt")
    response = await ask(apart)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "no such token"
    await apart.idle()


async def test_where_no_one_can_go_on_the_first_cause_is_told(apart: FakeMesh) -> None:
    first, second = apart.decodes
    first.script = fakes.die_later
    first.gate.set()
    second.refuses = InvalidRequestError("not with a seed", field="generated_token_ids")
    response = await ask(apart)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the worker is going away"
    await apart.idle()


async def test_tokenizer_that_is_gone_is_passed_over(mesh: FakeMesh) -> None:
    other = FakeTokenizer()
    await mesh.mesh.start(other.role, other.app)
    await mesh.node(mesh.tokenizer).stop()
    for _ in range(2):
        assert text(await ask(mesh)) == "Hello, world!"


async def in_two_parts(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
    """Emit a part of the answer, and the rest when the test opens the gate."""
    ids = fake.answer.encode()
    emit(ids[:5])
    await fake.gate.wait()
    for token in ids[5:]:
        emit([token])
        await asyncio.sleep(0)
    return FinishReason.STOP


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["wor"]}], ids=str)
async def test_tokenizer_that_dies_mid_stream_is_not_noticed(
    mesh: FakeMesh, more: dict[str, Any]
) -> None:
    other = FakeTokenizer()
    node = await mesh.mesh.start(other.role, other.app)
    mesh.decode.script = in_two_parts
    body = {"model": MODEL, "prompt": "x", "stream": True, **more}
    async with streaming(mesh, body) as lines:
        seen = [await anext(lines)]
        await (mesh.node(mesh.tokenizer) if mesh.tokenizer.texts else node).kill()
        mesh.decode.gate.set()
        seen += [line async for line in lines]
    assert "error" not in "".join(seen)
    assert seen[-2] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == ("Hello, " if "stop" in more else "Hello, world!")
    told = [event["choices"][0]["logprobs"] for event in events]
    if "logprobs" in more:
        assert "".join(t for each in told if each for t in each["tokens"]) == text
        offsets = [at for each in told if each for at in each["text_offset"]]
        assert offsets == list(range(len(text)))
    assert len(mesh.decode.starts) == 1  # it was not disturbed
    await mesh.decode.until(lambda: mesh.decode.live == 0)


async def test_tokenizer_that_dies_after_the_last_token_is_not_noticed(mesh: FakeMesh) -> None:
    other = FakeTokenizer()
    node = await mesh.mesh.start(other.role, other.app)
    for tokenizer in (mesh.tokenizer, other):
        tokenizer.unfinished = True
    asking = asyncio.create_task(ask(mesh))
    await mesh.decode.until(lambda: bool(mesh.decode.starts) and mesh.decode.live == 0)
    used = mesh.node(mesh.tokenizer) if mesh.tokenizer.texts else node
    for tokenizer in (mesh.tokenizer, other):
        tokenizer.unfinished = False
    await used.kill()
    assert text(await asking) == "Hello, world!"


async def test_the_only_tokenizer_that_dies_fails_the_request(mesh: FakeMesh) -> None:
    mesh.decode.script = in_two_parts
    asking = asyncio.create_task(ask(mesh))
    await mesh.tokenizer.until(lambda: bool(mesh.tokenizer.texts))
    await mesh.node(mesh.tokenizer).kill()
    assert (await asking).status_code == 503
    await mesh.decode.until(lambda: mesh.decode.live == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cancels_decode_and_counts_up_to_the_match(
    mesh: FakeMesh, stream: bool
) -> None:
    mesh.decode.script = fakes.babble
    response = await ask(mesh, stop=["wor"], stream=stream, **_usage(stream))
    assert response.status_code == 200
    await mesh.idle()
    assert len(mesh.decode.cancelled) == 1
    if not stream:
        assert response.json()["choices"][0] == {
            "index": 0,
            "text": "Hello, ",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "wor",
        }
        assert response.json()["usage"]["completion_tokens"] == 10
    else:
        assert '"completion_tokens":10' in response.text
        assert "wor" not in response.text.replace('"stop_reason":"wor"', "")


def _usage(stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if stream else {}


async def test_stop_token_has_no_text_but_is_counted(mesh: FakeMesh) -> None:
    async def stops(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        emit(b"abXc")
        emit(b"dX")
        return FinishReason.STOP

    mesh.decode.script = stops
    mesh.decode.stop_token = ord("X")
    response = await ask(mesh, stop_token_ids=[ord("X")])
    # An engine stops at the first one; the X in the middle is ordinary text here.
    assert text(response) == "abXcd"
    assert response.json()["usage"]["completion_tokens"] == 6
    kept = await ask(mesh, stop_token_ids=[ord("X")], include_stop_str_in_output=True)
    assert text(kept) == "abXcdX"


async def test_prompt_beyond_the_context_is_refused_before_routing(mesh: FakeMesh) -> None:
    long = await ask(mesh, prompt="x" * 8192, max_tokens=1)
    assert long.status_code == 400
    error = long.json()["error"]
    assert error["param"] == "prompt"
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]
    wanted = await ask(mesh, prompt="x" * 8000, max_tokens=193)
    assert wanted.json()["error"]["param"] == "max_tokens"
    assert "8000" in wanted.json()["error"]["message"]
    assert "8192" in wanted.json()["error"]["message"]
    assert not mesh.router.starts
    assert not mesh.decode.starts


# Where a request is while its client leaves, and how to make it stay there.


def at_tokenize(mesh: FakeMesh) -> Callable[[], bool]:
    mesh.tokenizer.hold = asyncio.Event()
    return lambda: mesh.tokenizer.live == 1


def at_route(mesh: FakeMesh) -> Callable[[], bool]:
    mesh.router.hold = True
    return lambda: mesh.router.live == 1


def at_prefill(mesh: FakeMesh) -> Callable[[], bool]:
    mesh.prefill.hold = asyncio.Event()
    return lambda: mesh.prefill.live == 1


def at_decode(mesh: FakeMesh) -> Callable[[], bool]:
    mesh.decode.script = fakes.stall
    return lambda: mesh.decode.live == 1


def at_text(mesh: FakeMesh) -> Callable[[], bool]:
    mesh.decode.script = fakes.babble
    return lambda: mesh.decode.live == 1 and bool(mesh.tokenizer.texts)


STAGES = [at_tokenize, at_route, at_prefill, at_decode, at_text]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_cancels_everything(
    apart: FakeMesh, stage: Callable[[FakeMesh], Callable[[], bool]], stream: bool
) -> None:
    there = stage(apart)
    asking = asyncio.create_task(ask(apart, stream=stream))
    await apart.tokenizer.until(there)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(1):
        await apart.gone()
        await apart.idle()
    assert metric(apart, 'kvmesh_requests_total{model="fake-model",outcome="cancelled"}') == 1
    if stage is at_decode:
        # No token came: the KV may wait still.
        await apart.prefill.until(lambda: apart.prefill.released == ["ticket-1"])


async def test_ticket_that_crosses_the_cancel_is_given_back(apart: FakeMesh) -> None:
    there = at_prefill(apart)
    apart.prefill.after_cancel = True
    asking = asyncio.create_task(ask(apart))
    await apart.tokenizer.until(there)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await apart.prefill.until(lambda: apart.prefill.released == ["ticket-1"])
    assert not apart.decode.starts


async def test_tickets_of_many_refused_requests_all_come_back(apart: FakeMesh) -> None:
    for decode in apart.decodes:
        decode.refuses = OverloadedError("full")
    responses = await asyncio.gather(*(ask(apart) for _ in range(20)))
    assert {response.status_code for response in responses} == {429}
    given = sum(prefill.given for prefill in apart.prefills)
    await apart.prefill.until(
        lambda: sum(len(prefill.released) for prefill in apart.prefills) == given
    )
    await apart.idle()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("deaf", [False, True])
async def test_deadline_ends_the_request_wherever_it_is(
    stage: Callable[[FakeMesh], Callable[[], bool]], deaf: bool
) -> None:
    """The frontend sees to it, even if the others don't."""
    async with fake_mesh(app, config(request_seconds=0.3), remote=True) as mesh:
        for fake in (mesh.tokenizer, mesh.router, mesh.prefill, mesh.decode):
            fake.ignores_deadlines = deaf
        stage(mesh)
        response = await ask(mesh)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await mesh.idle()


async def test_a12_tickets_of_clients_that_leave_all_come_back(apart: FakeMesh) -> None:
    for decode in apart.decodes:
        decode.script = fakes.stall
    asking = [asyncio.create_task(ask(apart)) for _ in range(50)]
    await apart.decode.until(lambda: apart.decode.live == 50)
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await apart.idle()
    given = {f"ticket-{n}" for n in range(1, 51)}
    await apart.prefill.until(lambda: set(apart.prefill.released) == given)


async def test_one_trace_covers_the_request() -> None:
    spans = InMemorySpanExporter()
    async with fake_mesh(app, config(), remote=True, spans=spans) as mesh:
        parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
        async with client_of(mesh) as client:
            body = {"model": MODEL, "prompt": "a secret"}
            await client.post("/v1/completions", json=body, headers={"traceparent": parent})
        await mesh.gone()
        (encode,), (decode,) = mesh.tokenizer.starts, mesh.decode.starts
    finished = {span.name: span for span in spans.get_finished_spans()}
    root = finished[f"text_completion {MODEL}"]
    steps = {"tokenize", "route", "prefill", "decode"}
    assert set(finished) == {"POST /v1/completions", root.name, *steps}
    assert {span.context.trace_id for span in finished.values()} == {
        0x0123456789ABCDEF0123456789ABCDEF
    }
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 13
    assert [event.name for event in root.events] == ["first_token"]
    assert f"{finished['tokenize'].context.span_id:016x}" in encode.context.traceparent
    assert f"{finished['decode'].context.span_id:016x}" in decode.context.traceparent
    assert "secret" not in "".join(span.to_json() for span in finished.values())


async def test_pipeline_closed_by_its_reader_cancels_decode(mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.babble
    body = {"model": MODEL, "prompt": "x", "stream": True}
    async with streaming(mesh, body) as lines:
        assert "Hello" in await anext(lines)
    await mesh.idle()
    assert len(mesh.decode.cancelled) == 1
