"""The REST API over real sockets: answers and refusals."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.testing.http import connected, error_of
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig

CONFIG = FrontendConfig(http=HttpConfig(port=0, max_body_mib=1))
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, CONFIG) as running:
        yield running


# Answers


async def test_openai_package_gets_the_same_streamed_and_not(
    mesh: FakeMesh, sdk: openai.AsyncOpenAI
) -> None:
    mesh.decode.answer = "Grüße 🙂 \u2028 from\u0085here"
    messages: Any = BODY["messages"]
    whole = await sdk.chat.completions.create(model=MODEL, messages=messages)
    assert whole.choices[0].message.content == mesh.decode.answer
    assert whole.choices[0].finish_reason == "stop"
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == mesh.decode.answer
    assert "" not in texts[1:-1]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage == whole.usage
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_openai_package_completes_text_and_lists_models(
    mesh: FakeMesh, sdk: openai.AsyncOpenAI
) -> None:
    whole = await sdk.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=5)
    assert whole.choices[0].text == "Hello"
    assert whole.choices[0].finish_reason == "length"
    stream = await sdk.completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("no-such-model")


async def test_openai_package_raises_what_it_should(
    mesh: FakeMesh, sdk: openai.AsyncOpenAI
) -> None:
    messages: Any = BODY["messages"]
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="no-such-model", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model=MODEL, messages=messages, temperature=-1)
    assert bad.value.param == "temperature"
    mesh.decode.script = fakes.die_later
    stream = await sdk.chat.completions.create(model=MODEL, messages=messages, stream=True)
    assert (await anext(stream)).choices[0].delta.role == "assistant"
    mesh.decode.gate.set()
    with pytest.raises(openai.APIError, match="going away"):
        _ = [chunk async for chunk in stream]


async def test_a03_a_broken_stream_ends_with_an_error_and_no_done(mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.die_later
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, {**BODY, "stream": True})
        head = await raw.reader.readuntil(b"Hello")
        assert head.startswith(b"HTTP/1.1 200")
        mesh.decode.gate.set()
        rest = (await raw.reader.readuntil(b"0\r\n\r\n")).decode()
    (line,) = [line for line in rest.splitlines() if line.startswith("data: ")]
    assert json.loads(line.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert "[DONE]" not in rest
    assert '"finish_reason":"' not in rest


async def test_a03_before_the_first_byte_a_failure_has_its_own_status(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    mesh.decode.script = fakes.die
    response = await client.post(CHAT, json={**BODY, "stream": True})
    assert response.status_code == 503
    assert error_of(response.content)["type"] == "server_error"


# Refusals


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (JSON, b'{"temperature": NaN}', 400),
        (JSON, b"nope", 400),
        (JSON, b"\xff\xfe", 400),
        (JSON, b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}', 400),
        (JSON, json.dumps({**BODY, "tools": json.loads("[" * 300 + "]" * 300)}).encode(), 400),
        (JSON, json.dumps({**BODY, "messages": "x"}).encode(), 400),
        (JSON, json.dumps({"messages": BODY["messages"]}).encode(), 400),
        (JSON, json.dumps({**BODY, "model": "no-such-model"}).encode(), 404),
        (JSON, b"{" + b" " * 1024 * 1024 + b"}", 413),
        ({}, json.dumps(BODY).encode(), 415),
        ({"content-type": "text/plain"}, json.dumps(BODY).encode(), 415),
        ({**JSON, "content-encoding": "gzip"}, gzip.compress(json.dumps(BODY).encode()), 415),
    ],
)
async def test_a02_bad_bodies_are_refused_in_openai_shape(
    mesh: FakeMesh, client: httpx.AsyncClient, headers: Any, body: bytes, status: int
) -> None:
    response = await client.post(CHAT, content=body, headers=headers)
    assert response.status_code == status
    assert error_of(response.content)["type"] == "invalid_request_error"
    assert not mesh.tokenizer.starts
    assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_a_chunked_body_beyond_the_limit_is_refused(client: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    response = await client.post(CHAT, content=parts(), headers=JSON)
    assert response.status_code == 413
    assert error_of(response.content)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", CHAT + "/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/no-such-model", 404),
        ("GET", CHAT, 405),
        ("PUT", "/v1/models", 405),
        ("DELETE", "/health", 405),
    ],
)
async def test_a40_routes_are_refused_in_openai_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    error_of(response.content)
    if status == 405:
        assert response.headers["allow"]


async def test_a40_head_and_options(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/v1/models", "/metrics"):
        response = await client.head(path)
        assert response.status_code == 200
        assert response.content == b""
    response = await client.options(CHAT)
    assert response.status_code == 204
    assert response.headers["allow"] == "POST, OPTIONS"


async def test_a08_a_callers_id_is_echoed_if_valid_and_goes_nowhere_else(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    response = await client.post(CHAT, json=BODY, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    for bad in (b"\xd0\xb7apros-1", b"a\tb", b"a" * 1024 * 1024):
        response = await client.post(CHAT, json=BODY, headers={b"x-request-id": bad})
        assert response.status_code == 200
        assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    ids = [start.context.request_id for start in mesh.tokenizer.starts]
    assert len(set(ids)) == 4
    assert all(len(one) == 32 for one in ids)


async def test_a39_one_id_twice_at_once_is_two_requests(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    mesh.decode.script = fakes.stall
    headers = {"x-request-id": "abc"}
    first, second = (
        asyncio.create_task(client.post(CHAT, json=BODY, headers=headers)) for _ in range(2)
    )
    await mesh.decode.until(lambda: mesh.decode.live == 2)
    first.cancel()
    await mesh.decode.until(lambda: mesh.decode.live == 1)
    mesh.decode.gate.set()
    assert (await second).json()["choices"][0]["message"]["content"] == "Hello, world!"


async def test_a23_models_and_readiness_follow_the_workers(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    assert (await client.get("/ready")).status_code == 200
    await mesh.node(mesh.decode).stop()
    response = await client.get("/ready")
    assert response.status_code == 503
    error_of(response.content)
    assert (await client.get("/v1/models")).json()["data"] == []
    assert (await client.get("/health")).status_code == 200
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_metrics_are_served(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json=BODY)
    await client.post(CHAT, json={**BODY, "n": 0})
    text = (await client.get("/metrics")).text
    assert 'kvmesh_requests_total{model="other",outcome="invalid"} 1.0' in text
    assert 'kvmesh_ttft_seconds_count{model="fake-model"} 1.0' in text
    assert 'kvmesh_completion_tokens_total{model="fake-model"} 13.0' in text


async def test_a08_ids_are_echoed_with_every_answer_and_headers_are_no_metadata(
    mesh: FakeMesh,
) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        for path, body, status in (
            (CHAT, BODY, 200),
            (CHAT, {**BODY, "n": 0}, 400),
            (CHAT, {**BODY, "model": "no-such-model"}, 404),
            ("/nope", BODY, 404),
            ("/health", BODY, 405),
        ):
            raw.post(path, body, "X-REQUEST-ID: Mine-1", "GRPC-Timeout: 1n", "X-Any-Bin: \xff")
            got, headers, _ = await raw.response()
            assert (got, headers["x-request-id"]) == (status, "Mine-1")
    for bad in ("a\r\n b", "a\0b"):
        async with connected(mesh.frontend.member.http_address) as raw:
            raw.post(CHAT, BODY, f"X-Request-Id: {bad}")
            status, _, body = await raw.response()
            assert (status, error_of(body)["code"]) == (400, "invalid_http")


async def test_the_api_describes_itself(mesh: FakeMesh, client: httpx.AsyncClient) -> None:
    version = (await client.get("/version")).json()["version"]
    described = (await client.get("/openapi.json")).json()
    assert described["info"]["version"] == version
    page = await client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "/v1/chat/completions" in page.text
    for path, methods in described["paths"].items():
        allowed = (await client.options(path.replace("{model}", MODEL))).headers["allow"]
        expected = [one for one in allowed.split(", ") if one not in ("HEAD", "OPTIONS")]
        assert [method.upper() for method in methods] == expected


async def test_a24_a_long_prompt_passes_every_hop_or_is_refused_with_its_status() -> None:
    async with (
        fake_mesh(app, FrontendConfig(http=HttpConfig(port=0))) as mesh,
        httpx.AsyncClient(base_url=mesh.url, verify=False, trust_env=False, timeout=60) as client,
    ):
        for size, statuses in ((4 * 1024 * 1024 + 1, {200, 400}), (17 * 1024 * 1024, {413})):
            body = {"model": MODEL, "prompt": "1" * size, "max_tokens": 1}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code in statuses
            if response.status_code != 200:
                assert error_of(response.content)["type"] == "invalid_request_error"
