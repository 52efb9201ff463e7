"""The routes that ask a model for something: bodies in, answers out."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

import orjson

from kvmesh.errors import MeshError
from kvmesh.host.process import Process
from kvmesh.types import TokenPrompt
from services.frontend.config import FrontendConfig
from services.frontend.explanation import Explanation
from services.frontend.keys import Keys
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline import Pipeline
from services.frontend.request import caller_id, check_limits, session_key
from services.frontend.rest.answers import Chat, Shape, Text, Whole
from services.frontend.rest.asgi import Exchange, Handler, while_connected
from services.frontend.rest.body import Body, parse
from services.frontend.rest.errors import Headers, HttpError
from services.frontend.rest.explaining import explaining, tell
from services.frontend.rest.schemas import (
    Arrival,
    Call,
    ParseBody,
    parse_chat,
    parse_detokenize,
    parse_text,
    parse_tokenize,
)
from services.frontend.rest.sse import Chunks

BODY_SECONDS = 60.0
"""Time for a client to send its body."""

GRACE_SECONDS = 10.0
"""Beyond a request's own deadline, for a client that is slow to read its end."""

REQUEST_ID = b"x-request-id"

_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_CLOSE = (b"connection", b"close")

Reply = Callable[[Exchange, Call], Awaitable[None]]


class InferenceRoutes:
    """What is served by the pipeline. `routes` are the handlers by path; all are for POST."""

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: FrontendMetrics,
        process: Process,
        config: FrontendConfig,
    ) -> None:
        self._pipeline = pipeline
        self._metrics = metrics
        self._process = process
        self._limits = config.limits
        self._keys = Keys(config.http.api_keys)
        self._max_body = config.http.max_body_mib * 1024 * 1024
        self.routes: dict[str, Handler] = {
            "/v1/chat/completions": self._route(parse_chat, partial(self._generate, shape=Chat)),
            "/v1/completions": self._route(parse_text, partial(self._generate, shape=Text)),
            "/tokenize": self._route(parse_tokenize, self._tokenize),
            "/detokenize": self._route(parse_detokenize, self._detokenize),
        }

    def _route(self, read: ParseBody, reply: Reply) -> Handler:
        return partial(self._serve, read=read, reply=reply)

    async def _serve(self, exchange: Exchange, *, read: ParseBody, reply: Reply) -> None:
        """Read a call and reply to it, for as long as the client is there."""
        try:
            body = await self._body(exchange)
            arrival = self._arrival(exchange)
            call = read(body, arrival, self._limits)
            # Before anything is made for each of the choices.
            check_limits(call.request, self._limits)
            self._process.gate.enter()
        except MeshError as error:
            self._metrics.refused(error.reason)
            raise
        try:
            request = call.request
            if not arrival.caller_id:  # else it is there already
                named = request.caller_id or request.id
                exchange.headers.append((REQUEST_ID, named.encode()))
            await while_connected(
                exchange,
                reply(exchange, call),
                request.deadline - self._process.clock.now() + GRACE_SECONDS,
            )
        finally:
            self._process.gate.leave()

    async def _generate(self, exchange: Exchange, call: Call, *, shape: Shape) -> None:
        created = int(self._process.clock.wall())
        with explaining(exchange, call.request, allowed=self._limits.explain) as explanation:
            if call.stream:
                await self._stream(exchange, call, Chunks(shape, call, created), explanation)
                return
            answer = Whole(shape, call, created)
            async with aclosing(self._pipeline.generate(call.request, explanation)) as pieces:
                async for piece in pieces:
                    answer.add(piece)
            if explanation is not None:
                tell(exchange, explanation, explanation.first())
            await exchange.respond(200, answer.body())

    async def _stream(
        self, exchange: Exchange, call: Call, chunks: Chunks, explanation: Explanation | None
    ) -> None:
        async with aclosing(self._pipeline.generate(call.request, explanation)) as pieces:
            async for piece in pieces:
                events = chunks.of(piece)
                if not exchange.started:
                    if explanation is not None:
                        tell(exchange, explanation, piece.index)
                    # Not before: until here a failure gets a status of its own.
                    await exchange.start(200, _EVENT_STREAM)
                if chunks.complete:
                    await exchange.end(events + chunks.end())
                elif events:
                    await exchange.write(events)

    async def _tokenize(self, exchange: Exchange, call: Call) -> None:
        (encoded,) = await self._pipeline.tokenize(call.request)
        tokens = list(encoded.token_ids)
        longest = self._pipeline.context_length(call.request.model)
        body = {
            "count": len(tokens),
            "max_model_len": longest or None,
            "tokens": tokens,
            "token_strs": None,
        }
        await exchange.respond(200, orjson.dumps(body))

    async def _detokenize(self, exchange: Exchange, call: Call) -> None:
        (prompt,) = call.request.prompts
        assert isinstance(prompt, TokenPrompt)
        text = await self._pipeline.detokenize(call.request, prompt.token_ids)
        await exchange.respond(200, orjson.dumps({"prompt": text}))

    async def _body(self, exchange: Exchange) -> Body:
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
            deadline=self._process.clock.now() + self._limits.request_seconds,
            traceparent=exchange.traceparent,
            caller_id=caller_id(exchange.header(REQUEST_ID)),
            session=session_key(exchange.header(b"x-kvmesh-session")),
            fair_key=self._keys.fair_key(exchange.headers_named(b"authorization")),
        )
