"""A closed-loop load of streamed chat completions, and what it measures.

One keep-alive connection per slot, read by a bare asyncio protocol, so that the generator
costs a few microseconds per event and leaves the cores to what is measured.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')

# One token each, with the space before it, in most byte-level BPE vocabularies.
WORDS = (  # noqa: SIM905 - reads better than a hundred quotes
    "time people way water day part place world work number sound year city house school "
    "country state life power line point form land case group night story river light "
    "mother father family body music color face door street book paper picture white black "
    "young early large small long great high open strong short clear dark deep warm cold "
    "table chair hand foot head heart mind word name king ship horse fish bird tree field "
    "stone wood fire earth moon star winter summer spring morning evening minute hour week "
    "month money price market road car train plane war peace law rule class doctor teacher"
).split()


@dataclass(frozen=True, slots=True)
class Load:
    """What to send: `concurrency` slots that each send their next request at once.

    `more` is added to each body.
    """

    host: str
    port: int
    model: str
    concurrency: int
    requests: int
    isl: int
    osl: int
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Measured:
    """What came of it. Times are in seconds; `itl` is a request's mean time per token."""

    seconds: float = 0.0
    tokens: int = 0
    errors: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)


def run(load: Load) -> Measured:
    """Send the whole load; returns once the last answer has ended."""
    return asyncio.run(_run(load))


async def _run(load: Load) -> Measured:
    measured = Measured()
    bodies = iter(_bodies(load))
    begin = time.perf_counter()
    await asyncio.gather(*(_slot(load, bodies, measured) for _ in range(load.concurrency)))
    measured.seconds = time.perf_counter() - begin
    return measured


def _bodies(load: Load) -> list[bytes]:
    rng = random.Random(load.seed)
    return [
        json.dumps(
            {
                "model": load.model,
                "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=load.isl))}],
                "max_tokens": load.osl,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **load.more,
            }
        ).encode()
        for _ in range(load.requests)
    ]


async def _slot(load: Load, bodies: Iterator[bytes], measured: Measured) -> None:
    loop = asyncio.get_running_loop()
    connection: _Connection | None = None
    for body in bodies:
        if connection is None or connection.closed:
            _, connection = await loop.create_connection(_Connection, load.host, load.port)
        await connection.ask(load, body, measured)
    if connection is not None:
        connection.close()


class _Connection(asyncio.Protocol):
    """One connection: sends a request, times the events of its answer."""

    def __init__(self) -> None:
        self.closed = False
        self._buffer = b""
        self._done: asyncio.Future[None] | None = None
        self._events: list[float] = []
        self._tokens = 0
        self._failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._finish(failed=True)

    def close(self) -> None:
        self._transport.close()

    async def ask(self, load: Load, body: bytes, measured: Measured) -> None:
        self._buffer, self._events, self._tokens, self._failed = b"", [], 0, False
        self._done = asyncio.get_running_loop().create_future()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {load.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        begin = time.perf_counter()
        self._transport.write(head.encode() + body)
        await self._done
        if self._failed or not self._events or self._tokens != load.osl:
            measured.errors += 1
            return
        measured.tokens += self._tokens
        measured.ttft.append(self._events[0] - begin)
        measured.e2e.append(self._events[-1] - begin)
        measured.itl.append((self._events[-1] - self._events[0]) / max(1, load.osl - 1))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        end = self._buffer.rfind(b"\n\n") + 2
        if end > 1:
            whole, self._buffer = self._buffer[:end], self._buffer[end:]
            texts = whole.count(b'"content":"') - whole.count(b'"content":""')
            self._events.extend([now] * texts)
            usage = _USAGE.search(whole)
            if usage:
                self._tokens = int(usage.group(1))
        if self._buffer.endswith(b"0\r\n\r\n"):
            self._finish(failed=False)
        elif self._buffer.startswith(b"HTTP/1.1 ") and not self._buffer.startswith(b"HTTP/1.1 200"):
            self._finish(failed=True)
            self.close()

    def _finish(self, *, failed: bool) -> None:
        if self._done is not None and not self._done.done():
            self._failed = failed
            self._done.set_result(None)
