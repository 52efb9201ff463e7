"""What every RPC of every service passes through, in the order of `STACK`.

Streams multiplex many requests, so what belongs to one request (its trace, deadline and
errors) is handled where requests are: in `kvmesh.rpc.serving` and the servicers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.message import DecodeError

from kvmesh.errors import DeadlineError, InternalError, InvalidRequestError, MeshError
from kvmesh.rpc.status import abort
from kvmesh.telemetry import safe_message

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    _Base = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Base = grpc.aio.ServerInterceptor

Around = Callable[[Callable[[], Awaitable[Any]], grpc.HandlerCallDetails, Any], Awaitable[Any]]


class Interceptor(_Base):
    """Runs `around(call, details, context)` in the place of every handler."""

    def __init__(self, around: Around) -> None:
        self._around = around

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one RPC, whatever its kind."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return _wrap(handler, handler_call_details, self._around)


class Decoding(_Base):
    """Refuses bytes that are not the RPC's message as what they are, a bad request.

    gRPC itself calls them UNKNOWN, before any handler runs, and inside of a stream it
    raises whatever the parser did.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Give one RPC a parser that fails as everything else does."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        kind, inner = _inner(handler)
        if handler.request_streaming:
            return _handler(kind, inner, handler, partial(_decoded, handler.request_deserializer))
        # A handler is needed for an error to have its details: the failure is passed in.
        return _handler(
            kind,
            _refusing(inner),
            handler,
            partial(_decoded_or_error, handler.request_deserializer),
        )


async def deadline(call: Callable[[], Awaitable[Any]], _: Any, context: Any) -> Any:
    """Stop a handler at the RPC's deadline, so that its work stops too."""
    left = context.time_remaining()
    if left is None:
        return await call()
    try:
        async with asyncio.timeout(left) as timer:
            return await call()
    except TimeoutError:
        if not timer.expired():
            raise
        raise DeadlineError("the call's time is up") from None


async def errors(
    call: Callable[[], Awaitable[Any]], details: grpc.HandlerCallDetails, context: Any
) -> Any:
    """End a failed RPC with a status that says what failed, and no more than that."""
    try:
        return await call()
    except MeshError as error:
        log.info("%s: %s: %s", details.method, error.reason, safe_message(error))
        failure = error
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:  # top of a request
        log.exception("%s failed", details.method)
        failure = InternalError("internal error")
    await abort(context, failure)


# `errors` is outside of `deadline`: a deadline in the middle of an abort would abort twice.
STACK: tuple[_Base, ...] = (Interceptor(errors), Interceptor(deadline), Decoding())
"""Outermost first."""


def interceptors() -> list[_Base]:
    """Return the interceptors of a server, outermost first."""
    return list(STACK)


def _wrap(handler: Any, details: grpc.HandlerCallDetails, around: Around) -> Any:
    """Return `handler` with `around` outside of it."""
    kind, inner = _inner(handler)
    outer = _outer(inner, details, around, streams=kind.endswith("_stream"))
    return _handler(kind, outer, handler, handler.request_deserializer)


def _inner(handler: Any) -> tuple[str, Any]:
    """Return what kind of RPC a handler is for, and its function."""
    for kind in ("unary_unary", "stream_unary", "unary_stream", "stream_stream"):
        inner = getattr(handler, kind)
        if inner is not None:
            return kind, inner
    raise AssertionError("a handler of no kind")


def _handler(kind: str, function: Any, like: Any, deserializer: Any) -> Any:
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        function,
        request_deserializer=deserializer,
        response_serializer=like.response_serializer,
    )


def _outer(inner: Any, details: Any, around: Around, *, streams: bool) -> Any:
    async def run(request: Any, context: Any) -> Any:
        async def call() -> Any:
            if not streams:
                return await inner(request, context)
            result = inner(request, context)
            if hasattr(result, "__aiter__"):
                async for message in result:
                    await context.write(message)
                return None
            return await result

        return await around(call, details, context)

    return run


def _decoded(decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except DecodeError:
        raise InvalidRequestError("the bytes are not a valid message of this rpc") from None


def _decoded_or_error(decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return _decoded(decode, data)
    except InvalidRequestError as error:
        return error


def _refusing(inner: Any) -> Any:
    def run(request: Any, context: Any) -> Any:
        if isinstance(request, InvalidRequestError):
            raise request
        return inner(request, context)

    return run
