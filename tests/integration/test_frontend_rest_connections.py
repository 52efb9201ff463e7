"""The REST API's connections: what is no HTTP or too much, clients that leave, the drain."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvmesh.errors import UnavailableError
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.testing.http import connected, error_of
from kvmesh.types import State
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig
from services.frontend.rest import protocol

CONFIG = FrontendConfig(http=HttpConfig(port=0, max_body_mib=1))
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, CONFIG) as running:
        yield running


async def test_what_is_not_http_is_refused_in_openai_shape(mesh: FakeMesh) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.writer.write(b"nonsense\r\n\r\n")
        head, _, body = (await raw.reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"


async def test_small_writes_are_sent_at_once(mesh: FakeMesh, monkeypatch: Any) -> None:
    seen: list[int] = []
    made = protocol.Protocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        sock = transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(protocol.Protocol, "connection_made", connection_made)
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, BODY)
        assert (await raw.reader.readline()).startswith(b"HTTP/1.1 200")
        assert seen == [1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a01_a_client_that_hangs_up_is_seen_within_a_second(
    mesh: FakeMesh, stream: bool
) -> None:
    mesh.decode.script = fakes.babble
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, {**BODY, "stream": stream})
        await mesh.decode.until(lambda: mesh.decode.live == 1 and bool(mesh.tokenizer.texts))
        await raw.close()
        async with asyncio.timeout(1):
            await mesh.gone()
            await mesh.idle()
        assert len(mesh.decode.cancelled) == 1


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: 100\r\n\r\n{{".encode()
        )
        await raw.writer.drain()
        await raw.close()
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_requests_one_after_another_share_a_connection(mesh: FakeMesh) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        for body, status in ((BODY, b"200"), ({**BODY, "n": 0}, b"400"), (BODY, b"200")):
            raw.post(CHAT, body)
            head = await raw.reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == status
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            json.loads(await raw.reader.readexactly(length))


async def test_pipelined_requests_are_answered_in_order(mesh: FakeMesh) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, {**BODY, "max_tokens": 1})
        raw.post(CHAT, {**BODY, "max_tokens": 2})
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
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, {**BODY, "stream": True})
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
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, {**BODY, "stream": True})
        assert b"Hello" in await raw.reader.readuntil(b"Hello")
        drain = asyncio.create_task(mesh.frontend.drain())
        await mesh.tokenizer.until(lambda: mesh.frontend.process.gate.closed)
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert error_of(response.content)["code"] == "draining"
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
            async with connected(mesh.frontend.member.http_address):
                pass


async def test_a_taken_port_is_said_by_name(mesh: FakeMesh) -> None:
    port = int(mesh.frontend.member.http_address.rpartition(":")[2])
    with pytest.raises(UnavailableError, match=str(port)):
        await mesh.mesh.start(
            mesh.frontend.member.role, app, FrontendConfig(http=HttpConfig(port=port))
        )
    assert mesh.frontend.member.state is State.STARTING


# Limits


async def refusal(mesh: FakeMesh, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send what may be refused before its end, and return the answer."""
    async with connected(mesh.frontend.member.http_address) as raw:
        for part in parts:
            raw.writer.write(part)
        answer = await raw.response()
        assert await raw.reader.read() == b""
        return answer


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",), 414),
        ((b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",), 431),
        ((b"GET /health HTTP/1.1\r\nHost: x\r\nx: ", *[b"x" * 65536] * 40), 431),
        ((b"GET /", *[b"x" * 65536] * 40), 431),
        ((b"GET /health HTTP/1.1\r\n", *[b"x: y\r\n" * 10_000] * 60), 431),
        ((b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",), 400),
        ((b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",), 400),
        ((b"GET /health HTTP/9.1\r\nHost: x\r\n\r\n",), 400),
        ((b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",), 400),
        ((b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",), 400),
    ],
)
async def test_a40_too_much_before_the_body_is_refused_in_openai_shape(
    mesh: FakeMesh, client: httpx.AsyncClient, parts: tuple[bytes, ...], status: int
) -> None:
    got, headers, body = await refusal(mesh, *parts)
    assert got == status
    assert headers["connection"] == "close"
    assert error_of(body)["type"] == "invalid_request_error"
    assert (await client.get("/health")).status_code == 200


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_a_client_that_never_begins_is_not_waited_for(
    mesh: FakeMesh, monkeypatch: Any
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    async with connected(mesh.frontend.member.http_address) as raw:
        assert await raw.reader.read() == b""


async def test_a_head_that_does_not_come_is_not_waited_for(
    mesh: FakeMesh, monkeypatch: Any
) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.writer.write(HEALTH)
        assert (await raw.response())[0] == 200
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
        raw.writer.write(HEALTH[:-8])
        status, headers, body = await raw.response()
        assert (status, headers["connection"]) == (408, "close")
        assert error_of(body)["code"] == "request_timeout"
        assert await raw.reader.read() == b""


async def test_what_follows_an_answer_does_not_hold_a_connection(
    mesh: FakeMesh, monkeypatch: Any
) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.writer.write(HEALTH)
        assert (await raw.response())[0] == 200
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
        raw.writer.write(b"\r\n")
        assert await raw.reader.read() == b""


async def test_a_slow_answer_is_not_cut_by_the_time_for_heads(
    mesh: FakeMesh, monkeypatch: Any
) -> None:
    late: list[object] = []
    was_late = protocol.Protocol._head_late

    def head_late(self: protocol.Protocol) -> None:
        late.append(self)
        was_late(self)

    monkeypatch.setattr(protocol.Protocol, "_head_late", head_late)
    mesh.decode.script = fakes.stall
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, BODY)
        await mesh.decode.until(lambda: mesh.decode.live == 1)
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.01)
        raw.writer.write(HEALTH[:-8])  # the next one, ahead
        await mesh.decode.until(lambda: len(late) > 2)
        mesh.decode.gate.set()
        assert (await raw.response())[0] == 200


async def test_connections_have_a_limit() -> None:
    config = FrontendConfig(http=HttpConfig(port=0, max_connections=1))
    async with (
        fake_mesh(app, config) as mesh,
        connected(mesh.frontend.member.http_address) as first,
    ):
        first.writer.write(HEALTH)
        assert (await first.response())[0] == 200
        status, _, body = await refusal(mesh, b"")
        assert (status, error_of(body)["code"]) == (503, "overloaded")
        first.writer.write(HEALTH)
        assert (await first.response())[0] == 200


async def test_a24_a_body_over_the_limit_is_refused_before_it_is_read(mesh: FakeMesh) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.writer.write(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {2**40}\r\n\r\n".encode()
        )
        status, _, body = await raw.response()
        assert (status, error_of(body)["code"]) == (413, "request_too_large")
        assert not mesh.tokenizer.starts
