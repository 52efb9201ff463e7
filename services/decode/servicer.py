"""`DecodeService` over an engine."""

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, cast

import grpc.aio

from kvmesh.engine.base import (
    EngineRequest,
    Finish,
    ResumeEngine,
    Step,
    StepEngine,
)
from kvmesh.errors import (
    CancelledByCallerError,
    InternalError,
    MeshError,
    SlowReaderError,
    TicketError,
)
from kvmesh.host.desk import EngineDesk
from kvmesh.host.engine_metrics import EngineMetrics, EngineWork
from kvmesh.rpc.serving import ServerCall
from kvmesh.rpc.specs import DECODE
from kvmesh.types import Completion, KvTicket, TokenLogprob, Usage
from kvmesh.v1 import decode_pb2, decode_pb2_grpc
from kvmesh.wire import ticket_from_proto
from kvmesh.wire_logprobs import logprobs_fit, logprobs_to_proto

log = logging.getLogger(__name__)

MAX_UNSENT_TOKENS = 4096
"""Tokens of one request that its reader has not taken; past it the request fails."""

PROMPT_TOKENS = 1024
"""Tokens of a prompt in one delta, where it goes back with log probabilities."""

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
        before = len(request.generated)
        if ticket is not None and self._desk.info.continues_first_token:
            before += len(ticket.first_token_ids)
        answer = _Answer(call, request.token_ids, before, self._desk.metrics)
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
        work = self._desk.work("engine.decode", request)
        call = answer.call

        def sink(step: Step | Exception) -> None:
            if isinstance(step, Exception):
                work.fail(step)
                call.fail(_mesh_error(step, request))
                return
            if not answer.add(step):
                engine.cancel(request.request_id)
                call.fail(_slow(work))
            elif step.finish is not None:
                call.end(self._finished(work, ticket, answer, step.finish))

        def cancel() -> None:
            engine.cancel(request.request_id)
            work.fail(CancelledByCallerError("cancelled"))

        call.on_cancel = cancel
        try:
            engine.submit(request, ticket, sink)
        except BaseException as error:
            work.fail(error)
            raise

    async def _iterate(
        self, request: EngineRequest, ticket: KvTicket | None, answer: "_Answer"
    ) -> Completion:
        with self._desk.work("engine.decode", request) as work:
            async with _closing(self._steps(request, ticket)) as steps:
                async for step in steps:
                    if not answer.add(step):
                        raise _slow(work)
                    if step.finish is not None:
                        return self._finished(work, ticket, answer, step.finish)
            raise InternalError("the engine ended a request without a finish")

    def _finished(
        self, work: EngineWork, ticket: KvTicket | None, answer: "_Answer", finish: Finish
    ) -> Completion:
        """Record a natural end; return it."""
        completion = answer.completion(finish)
        usage = completion.usage
        if usage is not None:
            work.span.set("kvmesh.completion_tokens", usage.completion_tokens)
            work.span.set("kvmesh.cached_tokens", usage.cached_tokens)
            if ticket is None:
                self._desk.metrics.prompt(usage.prompt_tokens, usage.cached_tokens)
        work.end(finish.reason)
        return completion

    def _steps(self, request: EngineRequest, ticket: KvTicket | None) -> AsyncIterator[Step]:
        if ticket is None:
            return self._desk.engine.generate(request)
        if not isinstance(self._desk.engine, ResumeEngine):
            raise TicketError(f"the engine {self._desk.info.engine} can't resume from a ticket")
        return self._desk.engine.resume(request, ticket)


class _Answer:
    """One request's tokens on their way into its stream's messages."""

    __slots__ = ("_before", "_metrics", "_offset", "_prompt", "call")

    def __init__(
        self, call: ServerCall, prompt: Sequence[int], before: int, metrics: EngineMetrics
    ) -> None:
        self.call = call
        self._metrics = metrics
        self._prompt = prompt
        self._before = before
        self._offset = 0

    def add(self, step: Step) -> bool:
        """Add a step's tokens to the unsent message; False when too many are unsent."""
        ids, logprobs = step.token_ids, step.logprobs
        if step.prompt_logprobs:
            self._add_prompt(step.prompt_logprobs)
        if not ids:
            return True
        outbox, stream_id = self.call.outbox, self.call.stream_id
        delta: Any = outbox.slots.get(stream_id)
        if delta is None or not logprobs_fit(logprobs, delta, len(delta.token_ids)):
            delta = outbox.next().deltas.add(stream_id=stream_id, offset=self._offset)
            outbox.slots[stream_id] = delta
        delta.token_ids.extend(ids)
        if not self._offset and step.cached_tokens is not None:
            delta.cached_tokens = step.cached_tokens
        self._offset += len(ids)
        self._metrics.completion_tokens += len(ids)
        if logprobs is not None:
            logprobs_to_proto(logprobs, delta)
            if len(delta.top_token_ids) > MAX_UNSENT_TOP_TOKENS:
                return False
        return len(delta.token_ids) <= MAX_UNSENT_TOKENS

    def _add_prompt(self, rows: Sequence[TokenLogprob]) -> None:
        """Add the prompt's tokens but the first. They come once, so they are not bounded."""
        for at in range(0, len(rows), PROMPT_TOKENS):
            some = rows[at : at + PROMPT_TOKENS]
            ids = self._prompt[at + 1 : at + 1 + len(some)]
            delta = self.call.outbox.next().deltas.add(
                stream_id=self.call.stream_id, offset=at + 1, token_ids=ids, prompt=True
            )
            logprobs_to_proto(some, delta)

    def completion(self, finish: Finish) -> Completion:
        """Return the request's natural end."""
        usage = Usage(
            prompt_tokens=len(self._prompt),
            completion_tokens=self._before + self._offset,
            cached_tokens=finish.cached_tokens,
        )
        return Completion(finish.reason, usage, finish.stop_token_id)


def _slow(work: EngineWork) -> SlowReaderError:
    error = SlowReaderError("the reader of this request fell behind")
    work.fail(error)
    return error


def _closing(steps: AsyncIterator[Step]) -> Any:
    return contextlib.aclosing(cast("AsyncGenerator[Step, None]", steps))


def _mesh_error(error: Exception, request: EngineRequest) -> MeshError:
    if isinstance(error, MeshError):
        return error
    log.error("request %s failed in the engine", request.request_id, exc_info=error)
    return InternalError("internal error")
