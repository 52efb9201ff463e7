"""One table from reason to gRPC code, HTTP status and what a caller may do.

Errors cross the wire as `google.rpc.Status` with exactly one `ErrorInfo` (the reason,
domain `kvmesh`) and, where an input is at fault, a `BadRequest` naming the field.
"""

from dataclasses import dataclass
from typing import NoReturn, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvmesh import errors
from kvmesh.errors import InternalError, MeshError, Reason

DOMAIN = "kvmesh"

MAX_MESSAGE_CHARS = 1000
"""Status details travel in HTTP/2 trailers, which gRPC cuts at 8 to 16 KiB."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a reason means to each kind of caller.

    `retry`: the same request may do better elsewhere or later, if nothing of its answer
    has been passed on.
    """

    code: grpc.StatusCode
    http: int
    openai_type: str
    retry: bool


_BAD_REQUEST = "invalid_request_error"
_SERVER = "server_error"

TABLE: dict[Reason, Row] = {
    Reason.INVALID_ARGUMENT: Row(grpc.StatusCode.INVALID_ARGUMENT, 400, _BAD_REQUEST, False),
    Reason.UNAUTHENTICATED: Row(grpc.StatusCode.UNAUTHENTICATED, 401, _BAD_REQUEST, False),
    Reason.UNKNOWN_MODEL: Row(grpc.StatusCode.NOT_FOUND, 404, _BAD_REQUEST, False),
    Reason.CONTEXT_LENGTH_EXCEEDED: Row(grpc.StatusCode.INVALID_ARGUMENT, 400, _BAD_REQUEST, False),
    Reason.REQUEST_TOO_LARGE: Row(grpc.StatusCode.INVALID_ARGUMENT, 413, _BAD_REQUEST, False),
    Reason.OVERLOADED: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", True),
    Reason.SLOW_READER: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", False),
    Reason.DEADLINE_EXCEEDED: Row(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error", False),
    Reason.CANCELLED: Row(grpc.StatusCode.CANCELLED, 499, _BAD_REQUEST, False),
    Reason.UNAVAILABLE: Row(grpc.StatusCode.UNAVAILABLE, 503, _SERVER, True),
    Reason.DRAINING: Row(grpc.StatusCode.UNAVAILABLE, 503, _SERVER, True),
    Reason.TICKET_REFUSED: Row(grpc.StatusCode.FAILED_PRECONDITION, 502, _SERVER, True),
    Reason.TRANSFER_FAILED: Row(grpc.StatusCode.ABORTED, 502, _SERVER, True),
    Reason.ENGINE_FAILED: Row(grpc.StatusCode.INTERNAL, 502, _SERVER, True),
    Reason.PROTOCOL: Row(grpc.StatusCode.FAILED_PRECONDITION, 502, _SERVER, False),
    Reason.INTERNAL: Row(grpc.StatusCode.INTERNAL, 500, _SERVER, False),
}

_CLASSES: dict[Reason, type[MeshError]] = {
    kind.reason: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MeshError) and kind is not MeshError
}

# What a bare gRPC status, without our details, is taken for.
_REASON_OF_CODE: dict[grpc.StatusCode, Reason] = {
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.NOT_FOUND: Reason.UNKNOWN_MODEL,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.OVERLOADED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: Reason.CANCELLED,
    grpc.StatusCode.UNAVAILABLE: Reason.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION: Reason.PROTOCOL,
    grpc.StatusCode.UNIMPLEMENTED: Reason.PROTOCOL,
}


def row(error: MeshError) -> Row:
    """Return the table's row for an error."""
    return TABLE[error.reason]


def to_status(error: MeshError) -> status_pb2.Status:
    """Return the error as it crosses the wire."""
    status = status_pb2.Status(
        code=row(error).code.value[0], message=error.message[:MAX_MESSAGE_CHARS]
    )
    details: list[error_details_pb2.ErrorInfo | error_details_pb2.BadRequest] = [
        error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN)
    ]
    if error.field is not None:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=status.message)
        details.append(bad)
    for detail in details:
        _pack(status, detail)
    if error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> MeshError:
    """Return the error that a status speaks of, as the class it was raised as."""
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    kind: type[MeshError] = InternalError
    field, retry_after = None, None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            kind = _CLASSES.get(_reason(info.reason), InternalError)
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return kind(status.message, field=field, retry_after=retry_after)


def from_rpc_error(error: grpc.aio.AioRpcError) -> MeshError:
    """Return what a failed RPC speaks of; a bare status by its code alone."""
    status = rpc_status.from_call(cast("grpc.Call", error))
    if status is not None:
        return from_status(status)
    kind = _CLASSES[_REASON_OF_CODE.get(error.code(), Reason.INTERNAL)]
    return kind(f"{error.code().name}: {error.details() or 'no details'}"[:MAX_MESSAGE_CHARS])


async def abort(context: grpc.aio.ServicerContext[object, object], error: MeshError) -> NoReturn:
    """End an RPC with an error and its details. Never returns."""
    status = to_status(error)
    await context.abort(
        row(error).code,
        status.message,
        trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),),
    )
    raise AssertionError("abort returned")


def _pack(status: status_pb2.Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _reason(name: str) -> Reason:
    return Reason(name) if name in Reason.__members__ else Reason.INTERNAL
