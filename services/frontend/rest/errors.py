"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import math

import orjson

from kvmesh.errors import MeshError, Reason
from kvmesh.rpc.status import row

Headers = list[tuple[bytes, bytes]]

_CODES = {
    Reason.UNKNOWN_MODEL: "model_not_found",
    Reason.OVERLOADED: "rate_limit_exceeded",
}
"""Where OpenAI has a name of its own; else it is ours, in lower case."""

_PARAMS = {"token_ids": "prompt", "text": "prompt", "stop_string": "stop"}
"""Fields as the mesh calls them inside, and as the caller wrote them."""


class HttpError(Exception):
    """What HTTP itself refuses, before there is a request: a route, a media type."""

    def __init__(self, status: int, code: str, message: str, headers: Headers | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers or []

    def body(self) -> bytes:
        """Return the error object."""
        return _body(self.message, "invalid_request_error", None, self.code)


def status_of(error: MeshError) -> int:
    """Return the HTTP status of an error."""
    return row(error).http


def body_of(error: MeshError) -> bytes:
    """Return the error object of an error."""
    code = code_of(error.reason)
    param = error.field if error.field is None else _PARAMS.get(error.field, error.field)
    return _body(error.message, row(error).openai_type, param, code)


def code_of(reason: Reason) -> str:
    """Return the `code` of errors of a reason."""
    return _CODES.get(reason, reason.value.lower())


def headers_of(error: MeshError) -> Headers:
    """Return the headers that go with an error."""
    if error.retry_after is None:
        return []
    return [(b"retry-after", str(max(1, math.ceil(error.retry_after))).encode())]


def _body(message: str, kind: str, param: str | None, code: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
