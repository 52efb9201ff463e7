"""The REST API over real sockets: shapes, refusals, clients that leave, the drain."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import openai
import pytest

from kvmesh.errors import UnavailableError
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.types import State
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


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=mesh.url, verify=False, trust_env=False, timeout=20
    ) as one:
        yield one


@pytest.fixture
async def sdk(mesh: FakeMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as one:
        yield one


class Raw:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def post(self, body: Any, path: str = CHAT) -> None:
        data = json.dumps(body).encode()
        self.writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def connected(mesh: FakeMesh) -> AsyncIterator[Raw]:
    host, _, port = mesh.frontend.member.http_address.rpartition(":")
    sock = socket.socket()
    # Small, so that what is not read is felt soon.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    except OSError:
        sock.close()
        raise
    raw = Raw(*await asyncio.open_connection(sock=sock))
    try:
        yield raw
    finally:
        with suppress(OSError):
            await raw.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"], body
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    assert body["error"]["code"]
    return dict(body["error"])


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
    async with connected(mesh) as raw:
        raw.post({**BODY, "stream": True})
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
    assert error_of(response)["type"] == "server_error"


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
    assert error_of(response)["type"] == "invalid_request_error"
    assert not mesh.tokenizer.starts
    assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_a_chunked_body_beyond_the_limit_is_refused(client: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    response = await client.post(CHAT, content=parts(), headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


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
    error_of(response)
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


async def test_what_is_not_http_is_refused_in_openai_shape(mesh: FakeMesh) -> None:
    async with connected(mesh) as raw:
        raw.writer.write(b"nonsense\r\n\r\n")
        head, _, body = (await raw.reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"


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
    error_of(response)
    assert (await client.get("/v1/models")).json()["data"] == []
    assert (await client.get("/health")).status_code == 200
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_metrics_are_served(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json=BODY)
    await client.post(CHAT, json={**BODY, "n": 2})
    text = (await client.get("/metrics")).text
    assert 'kvmesh_requests_total{outcome="invalid"} 1.0' in text
    assert "kvmesh_ttft_seconds_count 1.0" in text
    assert "kvmesh_completion_tokens_total 13.0" in text


# Connections


async def test_small_writes_are_sent_at_once(mesh: FakeMesh, monkeypatch: Any) -> None:
    from services.frontend.rest import server  # noqa: PLC0415

    seen: list[int] = []
    made = server._Protocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        sock = transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(server._Protocol, "connection_made", connection_made)
    async with connected(mesh) as raw:
        raw.post(BODY)
        assert (await raw.reader.readline()).startswith(b"HTTP/1.1 200")
        assert seen == [1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a01_a_client_that_hangs_up_is_seen_within_a_second(
    mesh: FakeMesh, stream: bool
) -> None:
    mesh.decode.script = fakes.babble
    async with connected(mesh) as raw:
        raw.post({**BODY, "stream": stream})
        await mesh.decode.until(lambda: mesh.decode.live == 1 and bool(mesh.tokenizer.texts))
        await raw.close()
        async with asyncio.timeout(1):
            await mesh.gone()
            await mesh.idle()
        assert len(mesh.decode.cancelled) == 1


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    async with connected(mesh) as raw:
        raw.writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: 100\r\n\r\n{{".encode()
        )
        await raw.writer.drain()
        await raw.close()
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_requests_one_after_another_share_a_connection(mesh: FakeMesh) -> None:
    async with connected(mesh) as raw:
        for body, status in ((BODY, b"200"), ({**BODY, "n": 2}, b"400"), (BODY, b"200")):
            raw.post(body)
            head = await raw.reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == status
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            json.loads(await raw.reader.readexactly(length))


async def test_pipelined_requests_are_answered_in_order(mesh: FakeMesh) -> None:
    async with connected(mesh) as raw:
        raw.post({**BODY, "max_tokens": 1})
        raw.post({**BODY, "max_tokens": 2})
        for text in ("H", "He"):
            head = await raw.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            body = json.loads(await raw.reader.readexactly(length))
            assert body["choices"][0]["message"]["content"] == text


async def test_a_reader_that_stalls_loses_its_request_alone(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    async def flood(fake: Any, start: Any, emit: fakes.Emit) -> Any:
        if not start.sampling.HasField("max_tokens"):
            while True:
                emit(b"x" * 512)
                await asyncio.sleep(0)
        return await fakes.say(fake, start, emit)

    mesh.decode.script = flood
    async with connected(mesh) as raw:
        raw.post({**BODY, "stream": True})
        await mesh.decode.until(lambda: len(mesh.decode.cancelled) == 1, seconds=60)
        response = await client.post(CHAT, json={**BODY, "max_tokens": 5})
        assert response.json()["choices"][0]["message"]["content"] == "Hello"
        await raw.close()
        await mesh.gone()


# The drain


async def test_a15_a_drain_lets_streams_finish_and_refuses_what_is_new(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    async def slow(fake: Any, start: Any, emit: fakes.Emit) -> Any:
        emit(b"Hello")
        await fake.gate.wait()
        emit(b" there")
        return fakes.FinishReason.STOP

    mesh.decode.script = slow
    async with connected(mesh) as raw:
        raw.post({**BODY, "stream": True})
        assert b"Hello" in await raw.reader.readuntil(b"Hello")
        drain = asyncio.create_task(mesh.frontend.drain())
        await mesh.tokenizer.until(lambda: mesh.frontend.process.gate.closed)
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert error_of(response)["code"] == "draining"
        assert response.headers["retry-after"]
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        mesh.decode.gate.set()
        rest = (await raw.reader.read()).decode()
        assert " there" in rest
        assert '"finish_reason":"stop"' in rest
        assert "data: [DONE]" in rest
        assert await drain
        with pytest.raises(ConnectionRefusedError):
            async with connected(mesh):
                pass


async def test_a_taken_port_is_said_by_name(mesh: FakeMesh) -> None:
    port = int(mesh.frontend.member.http_address.rpartition(":")[2])
    with pytest.raises(UnavailableError, match=str(port)):
        await mesh.mesh.start(
            mesh.frontend.member.role, app, FrontendConfig(http=HttpConfig(port=port))
        )
    assert mesh.frontend.member.state is State.STARTING
