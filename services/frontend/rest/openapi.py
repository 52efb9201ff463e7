"""`/openapi.json`: what this API takes and gives, made from the tables that it is read by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.rpc.status import TABLE
from services.frontend.rest.answer_schemas import ANSWERS, ERROR
from services.frontend.rest.errors import code_of
from services.frontend.rest.explaining import ASK, HEADERS, PREFIX
from services.frontend.rest.fields import table
from services.frontend.rest.request_fields import (
    CHAT,
    DETOKENIZE,
    MESSAGE,
    PART,
    TEXT,
    TOKENIZE_CHAT,
    TOKENIZE_TEXT,
)

_JSON = "application/json"

_HTTP_ERRORS: Mapping[int, str] = {
    401: "invalid_api_key: keys are configured, and no valid one was shown",
    408: "request_timeout: the body took too long to come",
    415: "unsupported_media_type: the body is not plain application/json",
}
"""What HTTP itself refuses, beside the reasons that requests fail for."""


@dataclass(frozen=True, slots=True)
class _Route:
    """`answers`: schemas by media type. `fails`: statuses other than 200."""

    method: str
    path: str
    text: str
    answers: Mapping[str, Any]
    body: str = ""
    fails: tuple[int, ...] = (401,)
    open: bool = False
    explained: bool = False


_FAILS = tuple(sorted({row.http for row in TABLE.values()} | _HTTP_ERRORS.keys()))

_EVENTS = (
    "One event is a line `data: {json}` and an empty line; the JSON is a %s. The last event "
    "is `data: [DONE]`. A failure after the first event is one event with an Error, and no "
    "[DONE] follows."
)


def document(version: str) -> dict[str, Any]:
    """Return the whole document, OpenAPI 3.1, for a version of the software."""
    paths: dict[str, Any] = {}
    for route in _ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvmesh",
            "version": version,
            "description": "OpenAI's API over a mesh. Each path with GET takes HEAD as well, "
            "and each path OPTIONS. In request bodies null is the same as absent, and a field "
            "that is not listed is refused.",
        },
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**_REQUESTS, **ANSWERS, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _events(chunk: str) -> dict[str, Any]:
    return {"type": "string", "description": _EVENTS % chunk}


_REQUESTS: Mapping[str, Any] = {
    "ChatCompletionRequest": table(CHAT),
    "CompletionRequest": table(TEXT),
    "TokenizeRequest": {"anyOf": [table(TOKENIZE_TEXT), table(TOKENIZE_CHAT)]},
    "DetokenizeRequest": table(DETOKENIZE),
    "Message": table(MESSAGE),
    "Part": table(PART),
}

_ROUTES = (
    _Route(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        {
            _JSON: _ref("ChatCompletion"),
            "text/event-stream": _events("ChatCompletionChunk"),
        },
        "ChatCompletionRequest",
        _FAILS,
        explained=True,
    ),
    _Route(
        "post",
        "/v1/completions",
        "Go on with a text.",
        {_JSON: _ref("Completion"), "text/event-stream": _events("CompletionChunk")},
        "CompletionRequest",
        _FAILS,
        explained=True,
    ),
    _Route(
        "post",
        "/tokenize",
        "Turn a prompt or a conversation into token ids.",
        {_JSON: _ref("Tokens")},
        "TokenizeRequest",
        _FAILS,
    ),
    _Route(
        "post",
        "/detokenize",
        "Turn token ids into text.",
        {_JSON: _ref("Detokenized")},
        "DetokenizeRequest",
        _FAILS,
    ),
    _Route("get", "/v1/models", "List what can be served now.", {_JSON: _ref("ModelList")}),
    _Route(
        "get",
        "/v1/models/{model}",
        "Describe a model that can be served now.",
        {_JSON: _ref("Model")},
        fails=(401, 404),
    ),
    _Route(
        "get", "/health", "Whether the process runs.", {_JSON: _ref("Health")}, fails=(), open=True
    ),
    _Route(
        "get",
        "/ready",
        "Whether some model can be served end to end. Names the models to those with a key.",
        {_JSON: _ref("Ready")},
        fails=(503,),
        open=True,
    ),
    _Route("get", "/version", "Version of the software.", {_JSON: _ref("Version")}),
    _Route("get", "/metrics", "Metrics for Prometheus.", {"text/plain": {"type": "string"}}),
    _Route("get", "/openapi.json", "This document.", {_JSON: {"type": "object"}}),
    _Route("get", "/docs", "This document, to be read.", {"text/html": {"type": "string"}}),
)


def _operation(route: _Route) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": "The answer.",
        "content": {kind: {"schema": schema} for kind, schema in route.answers.items()},
    }
    operation: dict[str, Any] = {
        "summary": route.text,
        "responses": {"200": answer, **{str(status): _failure(status) for status in route.fails}},
    }
    if route.body:
        content = {_JSON: {"schema": _ref(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
        operation["parameters"] = [_REQUEST_ID, _TRACEPARENT]
        answer["headers"] = {"x-request-id": {"schema": {"type": "string"}}}
    if route.explained:
        operation["parameters"].append(_EXPLAIN)
        answer["headers"] |= _EXPLAINED
    if "{model}" in route.path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if route.open:
        operation["security"] = []
    return operation


_REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "description": "Comes back if it is 1 to 128 printable characters of ASCII without spaces.",
    "schema": {"type": "string"},
}

_TRACEPARENT = {
    "name": "traceparent",
    "in": "header",
    "description": "Trace context of W3C; spans of this request go below it.",
    "schema": {"type": "string"},
}


_EXPLAIN = {
    "name": ASK.decode(),
    "in": "header",
    "description": "1: the response has the headers x-kvmesh-* that tell which workers answer, "
    "and why; streamed, before the first event.",
    "schema": {"type": "string"},
}

_EXPLAINED: Mapping[str, Any] = {
    PREFIX + name: {"description": f"Where asked for: {text}", "schema": {"type": "string"}}
    for name, text in HEADERS.items()
}


def _failure(status: int) -> dict[str, Any]:
    """Return the response of a status; the codes that it comes with are in its text."""
    codes = sorted(code_of(reason) for reason, row in TABLE.items() if row.http == status)
    response: dict[str, Any] = {
        "description": ", ".join(codes) or _HTTP_ERRORS[status],
        "content": {_JSON: {"schema": _ref("Error")}},
    }
    if status == 401:
        response["headers"] = {"www-authenticate": {"schema": {"type": "string"}}}
    if status in (429, 503):
        response["headers"] = {
            "retry-after": {"description": "Seconds.", "schema": {"type": "string"}}
        }
    return response
