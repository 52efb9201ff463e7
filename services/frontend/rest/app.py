"""The HTTP side of a frontend, as one ASGI application.

Plain ASGI, routes in a table: nothing stands between a handler and the connection, so
that a client that leaves is seen and a text event costs one call.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
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
from kvmesh.telemetry.exposition import CONTENT_TYPE
from services.frontend.config import FrontendConfig
from services.frontend.fleet import RETRY_AFTER_SECONDS, Fleet
from services.frontend.keys import SCHEME, Keys
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline import Pipeline
from services.frontend.request import caller_id
from services.frontend.rest.asgi import Exchange, Handler, Receive, Scope, Send
from services.frontend.rest.docs import page
from services.frontend.rest.errors import (
    Headers,
    HttpError,
    body_of,
    headers_of,
    status_of,
)
from services.frontend.rest.inference import REQUEST_ID, InferenceRoutes
from services.frontend.rest.observing import Observer
from services.frontend.rest.openapi import document
from services.frontend.rest.sse import error_event

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ready")
"""What is answered without a key: probes have none."""

_HTML: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
]

_MODELS = "/v1/models"


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
        self._fleet = fleet
        self._process = process
        self._keys = Keys(config.http.api_keys)
        self._started = int(process.clock.wall())
        found = _version()
        described = document(found)
        inference = InferenceRoutes(pipeline, metrics, process, config)
        self._routes: Mapping[str, Mapping[str, Handler]] = {
            **{path: {"POST": handler} for path, handler in inference.routes.items()},
            _MODELS: {"GET": self._models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._show_metrics},
            "/version": {"GET": _fixed(orjson.dumps({"version": found}))},
            "/openapi.json": {"GET": _fixed(orjson.dumps(described))},
            "/docs": {"GET": _fixed(page(described), _HTML)},
        }
        self._observer = Observer(process.telemetry, self._routes, _MODELS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever becomes of it."""
        exchange = Exchange(scope, receive, send)
        named = caller_id(exchange.header(REQUEST_ID))
        if named:
            exchange.headers.append((REQUEST_ID, named.encode()))
        with self._observer.observed(exchange):
            await self._serve(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)(exchange)
        except HttpError as error:
            await exchange.respond(error.status, error.body(), error.headers)
        except CancelledByCallerError:
            pass  # there is nobody to tell
        except MeshError as error:
            await self._fail(exchange, error)
        except Exception:  # top of a request
            log.exception("a request failed")
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
        allow = ", ".join(_allowed(methods))
        if methods is not None and method == "OPTIONS":
            # A browser asks so before it shows a key.
            return partial(_options, allow=allow.encode())
        if not (path in OPEN_PATHS and method in ("GET", "HEAD")) and not self._has_key(exchange):
            raise HttpError(
                401,
                "invalid_api_key",
                f"a valid API key is required, as 'Authorization: {SCHEME} ...'",
                [(b"www-authenticate", SCHEME.encode())],
            )
        if methods is None:
            raise HttpError(404, "not_found", f"there is no route {path[:128]!r}")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise HttpError(
                405,
                "method_not_allowed",
                f"{path[:128]!r} does not take {method}, only {allow}",
                [(b"allow", allow.encode())],
            )
        return handler

    def _has_key(self, exchange: Exchange) -> bool:
        return self._keys.accept(exchange.headers_named(b"authorization"))

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
        # Which models there are is for those with a key.
        shown = {"models": models} if self._has_key(exchange) else {}
        await exchange.respond(200, orjson.dumps({"status": "ready", **shown}))

    async def _show_metrics(self, exchange: Exchange) -> None:
        text = await asyncio.to_thread(self._process.telemetry.render)
        await exchange.respond(200, text, [(b"content-type", CONTENT_TYPE.encode())])


def _allowed(methods: Mapping[str, Handler] | None) -> list[str]:
    if methods is None:
        return []
    return [*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]


async def _options(exchange: Exchange, *, allow: bytes) -> None:
    await exchange.respond(204, b"", [(b"allow", allow)])


def _fixed(body: bytes, headers: Headers | None = None) -> Handler:
    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, body, headers)

    return handler


def _version() -> str:
    try:
        return version("kvmesh")
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return "0"
