"""`DecodeService` over an engine."""

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import grpc.aio

from kvmesh.engine.base import (
    EngineRequest,
    Finish,
    ResumeEngine,
    Step,
    StepEngine,
)
from kvmesh.errors import InternalError, MeshError, SlowReaderError, TicketError
from kvmesh.host.desk import EngineDesk
from kvmesh.rpc.serving import ServerCall
from kvmesh.rpc.specs import DECODE
from kvmesh.types import Completion, KvTicket, Usage
from kvmesh.v1 import decode_pb2, decode_pb2_grpc
from kvmesh.wire import logprobs_fit, logprobs_to_proto, ticket_from_proto

log = logging.getLogger(__name__)

MAX_UNSENT_TOKENS = 4096
"""Tokens of one request that its reader has not taken; past it the request fails."""

MAX_UNSENT_TOP_TOKENS = 16_384
"""The same, for the likeliest tokens beside them."""

SERVICE_NAME = "kvmesh.v1.DecodeService"


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Runs each start on the engine, by whole steps where the engine can."""

    def __init__(self, desk: EngineDesk) -> None:
        self._desk = desk
        self._stepper = desk.engine if isinstance(desk.engine, StepEngine) else None

    def register(self, server: grpc.aio.Server) -> None:
        """Add this to a server."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> None:
        """Serve one client's stream."""
        await self._desk.serve(DECODE, self._start, request_iterator, context)

    def _start(self, start: decode_pb2.DecodeStart, call: ServerCall) -> None:
        request = self._desk.request(start, call)
        ticket = ticket_from_proto(start.ticket) if start.HasField("ticket") else None
        before = (
            len(ticket.first_token_ids) if ticket and self._desk.info.continues_first_token else 0
        )
        answer = _Answer(call, len(request.token_ids), before)
        if self._stepper is not None:
            self._submit(self._stepper, request, ticket, answer)
        else:
            call.spawn(self._iterate(request, ticket, answer))

    def _submit(
        self,
        engine: StepEngine,
        request: EngineRequest,
        ticket: KvTicket | None,
        answer: "_Answer",
    ) -> None:
        span = self._desk.tracer.span("engine.decode", request.traceparent)
        call = answer.call

        def sink(step: Step | Exception) -> None:
            if isinstance(step, Exception):
                span.end(step)
                call.fail(_mesh_error(step, request))
                return
            if not answer.add(step):
                engine.cancel(request.request_id)
                span.end()
                call.fail(SlowReaderError("the reader of this request fell behind"))
            elif step.finish is not None:
                span.end()
                call.end(answer.completion(step.finish))

        def cancel() -> None:
            engine.cancel(request.request_id)
            span.end()

        call.on_cancel = cancel
        engine.submit(request, ticket, sink)

    async def _iterate(
        self, request: EngineRequest, ticket: KvTicket | None, answer: "_Answer"
    ) -> Completion:
        with self._desk.tracer.span("engine.decode", request.traceparent):
            async with _closing(self._steps(request, ticket)) as steps:
                async for step in steps:
                    if not answer.add(step):
                        raise SlowReaderError("the reader of this request fell behind")
                    if step.finish is not None:
                        return answer.completion(step.finish)
        raise InternalError("the engine ended a request without a finish")

    def _steps(self, request: EngineRequest, ticket: KvTicket | None) -> AsyncIterator[Step]:
        if ticket is None:
            return self._desk.engine.generate(request)
        if not isinstance(self._desk.engine, ResumeEngine):
            raise TicketError(f"the engine {self._desk.info.engine} can't resume from a ticket")
        return self._desk.engine.resume(request, ticket)


class _Answer:
    """One request's tokens on their way into its stream's messages."""

    __slots__ = ("_before", "_offset", "_prompt_tokens", "call")

    def __init__(self, call: ServerCall, prompt_tokens: int, before: int) -> None:
        self.call = call
        self._prompt_tokens = prompt_tokens
        self._before = before
        self._offset = 0

    def add(self, step: Step) -> bool:
        """Add a step's tokens to the unsent message; False when too many are unsent."""
        ids, logprobs = step.token_ids, step.logprobs
        if not ids:
            return True
        outbox, stream_id = self.call.outbox, self.call.stream_id
        delta: Any = outbox.slots.get(stream_id)
        if delta is None or not logprobs_fit(logprobs, delta, len(delta.token_ids)):
            delta = outbox.next().deltas.add(stream_id=stream_id, offset=self._offset)
            outbox.slots[stream_id] = delta
        delta.token_ids.extend(ids)
        self._offset += len(ids)
        if logprobs is not None:
            logprobs_to_proto(logprobs, delta)
            if len(delta.top_token_ids) > MAX_UNSENT_TOP_TOKENS:
                return False
        return len(delta.token_ids) <= MAX_UNSENT_TOKENS

    def completion(self, finish: Finish) -> Completion:
        """Return the request's natural end."""
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._before + self._offset,
            cached_tokens=finish.cached_tokens,
        )
        return Completion(finish.reason, usage, finish.stop_token_id)


def _closing(steps: AsyncIterator[Step]) -> Any:
    return contextlib.aclosing(cast("AsyncGenerator[Step, None]", steps))


def _mesh_error(error: Exception, request: EngineRequest) -> MeshError:
    if isinstance(error, MeshError):
        return error
    log.error("request %s failed in the engine", request.request_id, exc_info=error)
    return InternalError("internal error")
