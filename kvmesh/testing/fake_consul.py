"""A Consul agent that answers health queries by a script: for what a real one rarely does."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

_HEALTH = "/v1/health/service/"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the index header (None: there is none), and the service instances."""

    index: str | None
    instances: Sequence[Mapping[str, Any]] = ()
    status: int = 200


@dataclass(frozen=True, slots=True)
class Query:
    """One query as it came in; `index` is None where it wasn't sent."""

    service: str
    index: str | None
    token: str | None


@dataclass
class FakeConsul:
    """An async context manager that serves HTTP on the loopback.

    Each query for a service takes the next answer of its script, at once; when the script
    is used up, queries hang. A service without a script is empty. `queries` holds all.
    """

    scripts: Mapping[str, Sequence[Answer]]
    address: str = ""
    queries: list[Query] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Prepare the scripts."""
        self._left = {name: list(answers) for name, answers in self.scripts.items()}
        self._arrived = asyncio.Condition()
        self._clients: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        clients = list(self._clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await self._server.wait_closed()

    async def wait_for_queries(self, service: str, count: int) -> list[Query]:
        """Return the queries for a service once there are `count` of them."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._of(service)) >= count)
        return self._of(service)

    def _of(self, service: str) -> list[Query]:
        return [query for query in self.queries if query.service == service]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.create_task(self._serve(reader, writer))
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read_request(reader):
                target, headers = request
                answer = await self._answer(target, headers)
                writer.write(_response(answer))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, target: str, headers: Mapping[str, str]) -> Answer:
        url = urlsplit(target)
        service = unquote(url.path.removeprefix(_HEALTH))
        index = parse_qs(url.query).get("index", [None])[0]
        async with self._arrived:
            self.queries.append(Query(service, index, headers.get("x-consul-token")))
            self._arrived.notify_all()
        script = self._left.setdefault(service, [Answer("1")])
        if not script:
            await asyncio.Event().wait()
        return script.pop(0)


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]] | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    await reader.readexactly(int(headers.get("content-length", "0")))
    return first.split(" ")[1], headers


def _response(answer: Answer) -> bytes:
    body = json.dumps(list(answer.instances)).encode()
    head = f"HTTP/1.1 {answer.status} Scripted\r\nContent-Length: {len(body)}\r\n"
    if answer.index is not None:
        head += f"X-Consul-Index: {answer.index}\r\n"
    return head.encode() + b"\r\n" + body
