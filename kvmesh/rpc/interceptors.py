"""What every RPC of every service passes through, in the order of `STACK`.

Streams multiplex many requests, so what belongs to one request (its trace, deadline and
errors) is handled where requests are: in `kvmesh.rpc.serving` and the servicers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvmesh.errors import DeadlineError, InternalError, MeshError
from kvmesh.rpc.status import abort

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


async def deadline(call: Callable[[], Awaitable[Any]], _: Any, context: Any) -> Any:
    """Stop a handler at the RPC's deadline, so that its work stops too."""
    left = context.time_remaining()
    if left is None:
        return await call()
    try:
        async with asyncio.timeout(left):
            return await call()
    except TimeoutError:
        await abort(context, DeadlineError("the call's time is up"))


async def errors(
    call: Callable[[], Awaitable[Any]], details: grpc.HandlerCallDetails, context: Any
) -> Any:
    """End a failed RPC with a status that says what failed, and no more than that."""
    try:
        return await call()
    except MeshError as error:
        log.info("%s: %s: %s", details.method, error.reason, error.message)
        failure = error
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:  # top of a request
        log.exception("%s failed", details.method)
        failure = InternalError("internal error")
    await abort(context, failure)


STACK: tuple[Around, ...] = (deadline, errors)
"""Outermost first."""


def interceptors() -> list[_Base]:
    """Return the interceptors of a server, outermost first."""
    return [Interceptor(around) for around in STACK]


def _wrap(handler: Any, details: grpc.HandlerCallDetails, around: Around) -> Any:
    """Return `handler` with `around` outside of it."""
    for kind in ("unary_unary", "stream_unary", "unary_stream", "stream_stream"):
        inner = getattr(handler, kind)
        if inner is None:
            continue
        outer = _outer(inner, details, around, streams=kind.endswith("_stream"))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            outer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
    raise AssertionError("a handler of no kind")


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
