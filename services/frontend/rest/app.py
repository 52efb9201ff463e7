"""The HTTP side of a frontend, as one ASGI application.

Plain ASGI, routes in a table: nothing stands between a handler and the connection, so
that a client that leaves is seen and a text event costs one call.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson

from kvmesh.errors import (
    CancelledByCallerError,
    DrainingError,
    InternalError,
    MeshError,
    UnavailableError,
    UnknownModelError,
)
from kvmesh.host.process import Process
from kvmesh.telemetry import parse_traceparent
from kvmesh.telemetry.exposition import CONTENT_TYPE
from services.frontend.config import FrontendConfig
from services.frontend.fleet import RETRY_AFTER_SECONDS, Fleet
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline import Pipeline
from services.frontend.request import caller_id
from services.frontend.rest.asgi import Exchange, Handler, Receive, Scope, Send, while_connected
from services.frontend.rest.errors import (
    Headers,
    HttpError,
    body_of,
    headers_of,
    status_of,
)
from services.frontend.rest.fields import Object, parse
from services.frontend.rest.schemas import Arrival, Call, parse_chat, parse_text
from services.frontend.rest.sse import Chat, Chunks, Shape, Text, error_event, whole

log = logging.getLogger(__name__)

BODY_SECONDS = 60.0
"""Time for a client to send its body."""

GRACE_SECONDS = 10.0
"""Beyond a request's own deadline, for a client that is slow to read its end."""

_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_CLOSE = (b"connection", b"close")

_MODELS = "/v1/models"

ParseBody = Callable[[Object, Arrival], Call]


class RestApp:
    """OpenAI's routes over the pipeline, and what operators ask for."""

    def __init__(
        self,
        pipeline: Pipeline,
        fleet: Fleet,
        metrics: FrontendMetrics,
        process: Process,
        config: FrontendConfig,
    ) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._metrics = metrics
        self._process = process
        self._request_seconds = config.limits.request_seconds
        self._max_body = config.http.max_body_mib * 1024 * 1024
        self._started = int(process.clock.wall())
        chat = partial(parse_chat, max_messages=config.limits.messages)
        self._routes: Mapping[str, Mapping[str, Handler]] = {
            "/v1/chat/completions": {"POST": partial(self._generate, shape=Chat, read=chat)},
            "/v1/completions": {"POST": partial(self._generate, shape=Text, read=parse_text)},
            _MODELS: {"GET": self._models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._show_metrics},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever becomes of it."""
        exchange = Exchange(scope, receive, send)
        try:
            await self._handler(exchange)(exchange)
        except HttpError as error:
            await exchange.respond(error.status, error.body(), error.headers)
        except CancelledByCallerError:
            pass  # there is nobody to tell
        except MeshError as error:
            await self._fail(exchange, error)
        except Exception:  # top of a request
            log.exception("%s failed", exchange.path[:128])
            await self._fail(exchange, InternalError("internal error"))

    async def _fail(self, exchange: Exchange, error: MeshError) -> None:
        if exchange.started:
            await exchange.end(error_event(body_of(error)))
            return
        await exchange.respond(status_of(error), body_of(error), headers_of(error))

    def _handler(self, exchange: Exchange) -> Handler:
        path, method = exchange.path, exchange.scope["method"]
        methods = self._routes.get(path)
        if methods is None and path.startswith(_MODELS + "/") and len(path) > len(_MODELS) + 1:
            methods = {"GET": self._model}
        if methods is None:
            raise HttpError(404, "not_found", f"there is no route {path[:128]!r}")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is not None:
            return handler
        allow = ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"])
        if method == "OPTIONS":
            return partial(_options, allow=allow.encode())
        raise HttpError(
            405,
            "method_not_allowed",
            f"{path[:128]!r} does not take {method}, only {allow}",
            [(b"allow", allow.encode())],
        )

    async def _generate(self, exchange: Exchange, *, shape: Shape, read: ParseBody) -> None:
        try:
            call = read(await self._document(exchange), self._arrival(exchange))
            self._process.gate.enter()
        except MeshError as error:
            self._metrics.refused(error.reason)
            raise
        try:
            request = call.request
            exchange.headers.append((b"x-request-id", (request.caller_id or request.id).encode()))
            answer = self._stream if call.stream else self._whole
            await while_connected(
                exchange,
                answer(exchange, call, shape),
                request.deadline - self._process.clock.now() + GRACE_SECONDS,
            )
        finally:
            self._process.gate.leave()

    async def _stream(self, exchange: Exchange, call: Call, shape: Shape) -> None:
        request = call.request
        chunks = Chunks(shape, request.id, self._now(), request.model, usage=call.include_usage)
        async with aclosing(self._pipeline.generate(request)) as pieces:
            async for piece in pieces:
                events = chunks.text(piece.text) if piece.text else b""
                if not exchange.started:
                    # Not before: until here a failure gets a status of its own.
                    await exchange.start(200, _EVENT_STREAM)
                    events = chunks.first() + events
                if piece.completion is None:
                    await exchange.write(events)
                else:
                    await exchange.end(events + chunks.last(piece.completion))

    async def _whole(self, exchange: Exchange, call: Call, shape: Shape) -> None:
        request = call.request
        texts: list[str] = []
        async with aclosing(self._pipeline.generate(request)) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                if piece.completion is not None:
                    answer = "".join(texts), piece.completion
                    body = whole(shape, request.id, self._now(), request.model, answer)
                    await exchange.respond(200, body)

    async def _document(self, exchange: Exchange) -> Object:
        kind = exchange.header(b"content-type").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, "unsupported_media_type", "content-type must be application/json")
        coding = exchange.header(b"content-encoding").strip().lower()
        if coding not in ("", "identity"):
            raise HttpError(415, "unsupported_media_type", "content-encoding is not supported")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await exchange.body(self._max_body)
        except TimeoutError:
            raise HttpError(
                408, "request_timeout", "the body took too long to come", [_CLOSE]
            ) from None
        return parse(body)

    def _arrival(self, exchange: Exchange) -> Arrival:
        return Arrival(
            deadline=self._process.clock.now() + self._request_seconds,
            traceparent=parse_traceparent(exchange.header(b"traceparent")),
            caller_id=caller_id(exchange.header(b"x-request-id")),
        )

    def _now(self) -> int:
        return int(self._process.clock.wall())

    async def _models(self, exchange: Exchange) -> None:
        models = [self._describe(m.name, m.context_length) for m in self._fleet.models()]
        await exchange.respond(200, orjson.dumps({"object": "list", "data": models}))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(_MODELS + "/")
        for model in self._fleet.models():
            if model.name == name:
                body = orjson.dumps(self._describe(name, model.context_length))
                await exchange.respond(200, body)
                return
        raise UnknownModelError(f"the model {name[:128]!r} does not exist", field="model")

    def _describe(self, name: str, context_length: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvmesh",
            "max_model_len": context_length or None,
        }

    async def _health(self, exchange: Exchange) -> None:
        await exchange.respond(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        if self._process.gate.closed:
            raise DrainingError("this process is shutting down")
        models = [model.name for model in self._fleet.models()]
        if not models:
            raise UnavailableError(
                "no model can be served end to end", retry_after=RETRY_AFTER_SECONDS
            )
        await exchange.respond(200, orjson.dumps({"status": "ready", "models": models}))

    async def _show_metrics(self, exchange: Exchange) -> None:
        text = await asyncio.to_thread(self._process.telemetry.render)
        await exchange.respond(200, text, [(b"content-type", CONTENT_TYPE.encode())])


async def _options(exchange: Exchange, *, allow: bytes) -> None:
    await exchange.respond(204, b"", [(b"allow", allow)])
