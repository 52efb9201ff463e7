"""The bit of ASGI that we need: bodies with a limit, whole answers, clients that leave."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvmesh.errors import CancelledByCallerError, RequestTooLargeError
from services.frontend.rest.errors import Headers

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Handler = Callable[["Exchange"], Awaitable[None]]

JSON = (b"content-type", b"application/json")


class Exchange:
    """One HTTP request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = False
        """Whether the client has got a status."""
        self.status = 0
        """The status that the client has got; 0: none yet."""
        self.traceparent = ""
        """The trace that its work belongs to."""
        self.complete = False
        """Whether the last byte has been handed over."""
        self.headers: Headers = []
        """Headers that every response to this request gets."""
        self._receive = receive
        self._send = send

    @property
    def path(self) -> str:
        """The path, without a query."""
        path: str = self.scope["path"]
        return path

    def header(self, name: bytes) -> str:
        """Return the first header of this name (in lower case), "" if there is none."""
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return ""

    def headers_named(self, name: bytes) -> list[bytes]:
        """Return every header of this name (in lower case)."""
        return [value for key, value in self.scope["headers"] if key == name]

    async def body(self, limit: int) -> bytes:
        """Read the whole body. Raises `RequestTooLargeError` beyond `limit` bytes."""
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CancelledByCallerError("the client left before its request was read")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status and headers."""
        self.started = True
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self.headers],
            }
        )

    async def write(self, body: bytes) -> None:
        """Send more of a streamed body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """Send the last of a body."""
        await self._send({"type": "http.response.body", "body": body})
        self.complete = True

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """Send a whole response: JSON, unless the headers say something else."""
        headers = headers or []
        if not any(name == b"content-type" for name, _ in headers):
            headers = [JSON, *headers]
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def gone(self) -> None:
        """Wait until the client is gone, or the response complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def while_connected(exchange: Exchange, work: Awaitable[None], seconds: float) -> None:
    """Do `work` for as long as somebody is there to read its outcome.

    It is cancelled when the client leaves, or stops reading for longer than `seconds`
    altogether; then this returns. To be called when the body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    left = False

    def stop(*_: object) -> None:
        nonlocal left
        if not exchange.complete and not left:
            left = True
            task.cancel()

    watcher = asyncio.create_task(exchange.gone())
    watcher.add_done_callback(stop)
    timer = asyncio.get_running_loop().call_later(seconds, stop)
    try:
        await work
    except asyncio.CancelledError:
        if not left or task.uncancel():
            raise
    finally:
        timer.cancel()
        watcher.remove_done_callback(stop)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than {limit} bytes")
