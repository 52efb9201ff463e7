"""`InferenceService` on the wire: requests in, text and completions out."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from kvmesh.clock import Clock
from kvmesh.errors import (
    InvalidRequestError,
    MeshError,
    ProtocolError,
    SlowReaderError,
    UnauthenticatedError,
)
from kvmesh.host.process import Process
from kvmesh.rpc.serving import ServerCall, ServerStream
from kvmesh.rpc.specs import GENERATE
from kvmesh.rpc.status import row
from kvmesh.telemetry import Kind, parse_traceparent
from kvmesh.types import Completion, Context
from kvmesh.v1 import inference_pb2, inference_pb2_grpc
from kvmesh.wire import completion_to_proto, prompt_from_proto, sampling_from_proto
from kvmesh.wire_logprobs import text_logprobs_to_proto
from services.frontend.answer import Piece
from services.frontend.config import FrontendConfig
from services.frontend.explanation import Explanation
from services.frontend.fleet import Fleet
from services.frontend.keys import Keys
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline import Pipeline
from services.frontend.request import Request, caller_id, check_limits, session_key

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

MAX_UNSENT_CHARS = 65_536
"""Text of one request on a multiplexed stream that its reader has not taken."""

MAX_UNSENT_LOGPROBS = 1024
"""The same, for its tokens where log probabilities were asked for."""

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_PREFIX = "models/"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves the pipeline over gRPC."""

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
        self._limits = config.limits
        self._keys = Keys(config.http.api_keys)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateResponse:
        """Generate a completion."""
        with self._served("Generate", self._context(context)) as arrived, self._admitted(context):
            wanted = self._parse(request.model, request, arrived, self._fair_key(context))
            texts: list[str] = []
            response = inference_pb2.GenerateResponse(request_id=wanted.id)
            told = _Telling(self._explanation(request, wanted))
            async with aclosing(self._pipeline.generate(wanted, told.due)) as pieces:
                async for piece in pieces:
                    texts.append(piece.text)
                    text_logprobs_to_proto(piece.logprobs, response)
            response.text = "".join(texts)
            completion_to_proto(piece.completion or Completion(), response.completion)
            told.write(response)
            return response

    async def StreamGenerate(
        self, request: inference_pb2.StreamGenerateRequest, context: Any
    ) -> None:
        """Generate a completion and stream it."""
        served = self._served("StreamGenerate", self._context(context))
        with served as arrived, self._admitted(context):
            wanted = self._parse(request.model, request, arrived, self._fair_key(context))
            response = partial(inference_pb2.StreamGenerateResponse, request_id=wanted.id)
            told = _Telling(self._explanation(request, wanted))
            # Not an async generator: gRPC would not close it at once when the client goes.
            async with aclosing(self._pipeline.generate(wanted, told.due)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        some = response(text=piece.text)
                        text_logprobs_to_proto(piece.logprobs, some)
                        told.write(some)
                        await context.write(some)
                    if piece.completion is not None:
                        last = response()
                        text_logprobs_to_proto(() if piece.text else piece.logprobs, last)
                        completion_to_proto(piece.completion, last.completion)
                        told.write(last)
                        await context.write(last)

    async def MultiplexGenerate(
        self, request_iterator: AsyncIterator[inference_pb2.MultiplexGenerateRequest], context: Any
    ) -> None:
        """Generate many completions over one stream."""
        self._authenticate(context)
        process = self._process
        stream = ServerStream(
            GENERATE,
            partial(self._start, fair_key=self._fair_key(context)),
            identity=process.identity,
            gate=process.gate,
            clock=process.clock,
        )
        await stream.run(request_iterator, context)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """List what can be served now, by name; a page goes on after the last name."""
        self._authenticate(context)
        if request.page_size < 0:
            raise InvalidRequestError("page_size is negative", field="page_size")
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        models = [m for m in self._fleet.models() if m.name > request.page_token]
        response = inference_pb2.ListModelsResponse()
        for model in models[:size]:
            response.models.add(name=_PREFIX + model.name, context_length=model.context_length)
        if len(models) > size:
            response.next_page_token = models[size - 1].name
        return response

    def _explanation(self, message: Any, request: Request) -> Explanation | None:
        """Return what is to be filled and told, where the caller wants to know."""
        wanted = message.input.explain and self._limits.explain
        return Explanation(request.id, request.choices) if wanted else None

    def _start(
        self, start: inference_pb2.GenerateStart, call: ServerCall, *, fair_key: str
    ) -> None:
        call.spawn(self._answer(start, call, fair_key))

    async def _answer(
        self, start: inference_pb2.GenerateStart, call: ServerCall, fair_key: str
    ) -> Completion:
        with self._served("MultiplexGenerate", call.context) as arrived:
            wanted = self._parse(start.model, start, arrived, fair_key)
            told = _Telling(self._explanation(start, wanted))
            async with aclosing(self._pipeline.generate(wanted, told.due)) as pieces:
                async for piece in pieces:
                    if told.due is not None:
                        told.write(call.outbox.next().explanations.add(stream_id=call.stream_id))
                    if piece.text or piece.logprobs:
                        _send(call, piece)
                    if piece.completion is not None:
                        return piece.completion
        raise ProtocolError("the answer had no end")

    @contextmanager
    def _served(self, method: str, arrived: Context) -> Iterator[Context]:
        """Trace a request as the RPC that it came by; its work goes under that span."""
        span = self._process.telemetry.tracer.span(
            f"{SERVICE_NAME}/{method}",
            arrived.traceparent,
            {"rpc.system.name": "grpc", "rpc.method": f"{SERVICE_NAME}/{method}"},
            kind=Kind.SERVER,
        )
        with span:
            try:
                yield replace(arrived, traceparent=span.traceparent)
            except MeshError as error:
                span.set("rpc.response.status_code", row(error).code.name)
                raise
            span.set("rpc.response.status_code", "OK")

    @contextmanager
    def _admitted(self, context: Any) -> Any:
        gate = self._process.gate
        try:
            self._authenticate(context)
            gate.enter()
        except MeshError as error:
            self._metrics.refused(error.reason)
            raise
        try:
            yield
        finally:
            gate.leave()

    def _authenticate(self, context: Any) -> None:
        if not self._keys.accept(_shown(context)):
            raise UnauthenticatedError("an API key is required: authorization: Bearer <key>")

    def _fair_key(self, context: Any) -> str:
        return self._keys.fair_key(_shown(context))

    def _context(self, context: Any) -> Context:
        """Return what a unary or streaming RPC says of its request."""
        clock: Clock = self._process.clock
        left = context.time_remaining()
        metadata = dict(context.invocation_metadata() or ())
        traceparent = parse_traceparent(str(metadata.get("traceparent", "")))
        deadline = None if left is None else clock.now() + left
        return Context(str(metadata.get("x-request-id", "")), deadline, traceparent)

    def _parse(self, model: str, message: Any, context: Context, fair_key: str) -> Request:
        try:
            return self._request(model, message, context, fair_key)
        except InvalidRequestError as error:
            self._metrics.refused(error.reason, model.removeprefix(_PREFIX))
            raise

    def _request(self, model: str, message: Any, context: Context, fair_key: str) -> Request:
        if not model.startswith(_PREFIX) or model == _PREFIX:
            raise InvalidRequestError("model must have the form models/{model}", field="model")
        if not message.HasField("input"):
            raise InvalidRequestError("input is required", field="input")
        given = message.input
        if given.sampling.HasField("prompt_logprobs"):
            raise InvalidRequestError(
                "prompt_logprobs are not supported here", field="prompt_logprobs"
            )
        latest = self._process.clock.now() + self._limits.request_seconds
        request = Request(
            model=model.removeprefix(_PREFIX),
            prompts=(prompt_from_proto(given),),
            deadline=latest if context.deadline is None else min(context.deadline, latest),
            sampling=sampling_from_proto(given.sampling),
            truncate_to=given.truncate_to or None,
            stop=tuple(given.stop),
            include_stop=given.include_stop,
            keep_special=given.keep_special,
            bad_words=tuple(given.bad_words),
            priority=given.priority or context.priority,
            session=session_key(given.session),
            fair_key=fair_key,
            traceparent=parse_traceparent(context.traceparent),
            caller_id=caller_id(context.request_id),
        )
        check_limits(request, self._limits)
        return request


class _Telling:
    """Where a request runs, for its first message; `due` is None when nobody wants to know."""

    __slots__ = ("due",)

    def __init__(self, explanation: Explanation | None) -> None:
        self.due = explanation

    def write(self, message: Any) -> None:
        """Write it into the first message, if it is due and the request runs anywhere."""
        explanation, self.due = self.due, None
        placed = explanation.of(0) if explanation is not None else None
        if placed is None:
            return
        plan, out = placed.plan, message.explanation
        out.decode_worker_id = plan.decode.id
        out.prefill_worker_id = "" if plan.prefill is None else plan.prefill.id
        out.reason = plan.reason
        out.policy = plan.policy
        out.router_id = placed.router_id
        out.prompt_tokens = placed.prompt_tokens
        out.expected_cached_tokens = plan.expected_cached_tokens
        out.queue_seconds = plan.waited
        out.why = plan.why
        for failure in placed.failures:
            out.failures.add(step=failure.step, worker_id=failure.worker_id, reason=failure.reason)


def _shown(context: Any) -> list[bytes]:
    """Return what a call shows to be let in."""
    metadata = context.invocation_metadata() or ()
    return [_bytes(value) for name, value in metadata if name == "authorization"]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _send(call: ServerCall, piece: Piece) -> None:
    """Add text to the entry that still waits to go, if there is one."""
    outbox = call.outbox
    delta: Any = outbox.slots.get(call.stream_id)
    if delta is None:
        delta = outbox.next().deltas.add(stream_id=call.stream_id)
        outbox.slots[call.stream_id] = delta
    delta.text += piece.text
    delta.token_count = piece.token_count
    text_logprobs_to_proto(piece.logprobs, delta)
    if len(delta.text) > MAX_UNSENT_CHARS or len(delta.logprobs) > MAX_UNSENT_LOGPROBS:
        raise SlowReaderError("the reader of this request fell behind")
