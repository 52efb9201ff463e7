"""HTTP/1.1 on one connection: uvicorn's protocol with limits, and with our kind of errors."""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.frontend.rest.errors import HttpError

MAX_HEAD_BYTES = 2 * 1024 * 1024
"""A request line and headers. So much, since an absurd `x-request-id` is no reason to fail."""

MAX_HEADERS = 256

MAX_TARGET_BYTES = 16 * 1024
"""Path and query, of which nothing here needs more than a model's name."""

LINGER_SECONDS = 2.0
"""For a client that still sends to read that it is refused: closing at once would cut that off."""

HEAD_SECONDS = 30.0
"""Time for a client to send its request line and headers, and to begin after it connected."""


class Protocol(HttpToolsProtocol):  # type: ignore[misc]
    """One connection."""

    def __init__(self, *args: Any, max_connections: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self._max_connections = max_connections
        self._head_bytes = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._refusal: HttpError | None = None

    def connection_made(self, transport: Any) -> None:
        """Send small events at once, whatever the event loop's default is."""
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > self._max_connections:
            self._refuse(HttpError(503, "overloaded", "there are too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timers."""
        self._head_came()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within the limits of a head."""
        if self._closing:
            return
        super().data_received(data)
        if self._closing:
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large(f"the headers have more than {MAX_HEAD_BYTES} bytes"))
        elif self._idle and self.timeout_keep_alive_task is None:
            # Neither a request nor the pause between two: it must not go on for ever.
            self._expect_head()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Go on to the request, if its head is within the limits."""
        self._in_head = False
        self._head_came()
        if len(self.url) > MAX_TARGET_BYTES:
            limit = f"the path has more than {MAX_TARGET_BYTES} bytes"
            self._refusal = HttpError(HTTPStatus.REQUEST_URI_TOO_LONG, "uri_too_long", limit)
        elif len(self.headers) > MAX_HEADERS:
            self._refusal = _too_large(f"there are more than {MAX_HEADERS} headers")
        if self._refusal is not None:
            raise self._refusal  # which the parser turns into `send_400_response`
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or is too much of it."""
        self._refuse(self._refusal or HttpError(HTTPStatus.BAD_REQUEST, "invalid_http", msg))

    @property
    def _closing(self) -> bool:
        """Whether nothing more is read."""
        return self._linger_timer is not None or bool(self.transport.is_closing())

    @property
    def _idle(self) -> bool:
        """Whether nothing is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _refuse(self, error: HttpError) -> None:
        """Say why, unless it would be in the middle of an answer, and close."""
        self._head_came()
        if self._closing:
            return
        if not self._idle and self.cycle.response_started:
            self.transport.close()
            return
        body = error.body()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(body))
            + body
        )
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if not self._idle:  # a client that sends its next request ahead
            self._expect_head()
        elif self._in_head:
            self._refuse(HttpError(408, "request_timeout", "the headers took too long to come"))
        else:
            self.transport.close()


def _too_large(limit: str) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "request_header_fields_too_large", limit
    )
