"""`InferenceService` on the wire: requests in, text and completions out."""

from collections.abc import AsyncIterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

import grpc.aio

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, ProtocolError, SlowReaderError
from kvmesh.host.process import Process
from kvmesh.rpc.serving import ServerCall, ServerStream
from kvmesh.rpc.specs import GENERATE
from kvmesh.telemetry import parse_traceparent
from kvmesh.types import Completion, Context
from kvmesh.v1 import inference_pb2, inference_pb2_grpc
from kvmesh.wire import completion_to_proto, prompt_from_proto, sampling_from_proto
from services.frontend.fleet import Fleet
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline import Pipeline
from services.frontend.request import Request, caller_id

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

MAX_UNSENT_CHARS = 65_536
"""Text of one request on a multiplexed stream that its reader has not taken."""

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
        request_seconds: float,
    ) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._metrics = metrics
        self._process = process
        self._request_seconds = request_seconds

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateResponse:
        """Generate a completion."""
        with self._admitted():
            wanted = self._parse(request.model, request, self._context(context))
            texts: list[str] = []
            async with aclosing(self._pipeline.generate(wanted)) as pieces:
                async for piece in pieces:
                    texts.append(piece.text)
            response = inference_pb2.GenerateResponse(text="".join(texts), request_id=wanted.id)
            completion_to_proto(piece.completion or Completion(), response.completion)
            return response

    async def StreamGenerate(
        self, request: inference_pb2.StreamGenerateRequest, context: Any
    ) -> None:
        """Generate a completion and stream it."""
        with self._admitted():
            wanted = self._parse(request.model, request, self._context(context))
            response = partial(inference_pb2.StreamGenerateResponse, request_id=wanted.id)
            # Not an async generator: gRPC would not close it at once when the client goes.
            async with aclosing(self._pipeline.generate(wanted)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        await context.write(response(text=piece.text))
                    if piece.completion is not None:
                        last = response()
                        completion_to_proto(piece.completion, last.completion)
                        await context.write(last)

    async def MultiplexGenerate(
        self, request_iterator: AsyncIterator[inference_pb2.MultiplexGenerateRequest], context: Any
    ) -> None:
        """Generate many completions over one stream."""
        process = self._process
        stream = ServerStream(
            GENERATE, self._start, identity=process.identity, gate=process.gate, clock=process.clock
        )
        await stream.run(request_iterator, context)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """List what can be served now, by name; a page goes on after the last name."""
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

    def _start(self, start: inference_pb2.GenerateStart, call: ServerCall) -> None:
        call.spawn(self._answer(self._parse(start.model, start, call.context), call))

    async def _answer(self, wanted: Request, call: ServerCall) -> Completion:
        async with aclosing(self._pipeline.generate(wanted)) as pieces:
            async for piece in pieces:
                if piece.text:
                    _send(call, piece.text, piece.token_count)
                if piece.completion is not None:
                    return piece.completion
        raise ProtocolError("the answer had no end")

    @contextmanager
    def _admitted(self) -> Any:
        gate = self._process.gate
        gate.enter()
        try:
            yield
        finally:
            gate.leave()

    def _context(self, context: Any) -> Context:
        """Return what a unary or streaming RPC says of its request."""
        clock: Clock = self._process.clock
        left = context.time_remaining()
        metadata = dict(context.invocation_metadata() or ())
        traceparent = parse_traceparent(str(metadata.get("traceparent", "")))
        deadline = None if left is None else clock.now() + left
        return Context(str(metadata.get("x-request-id", "")), deadline, traceparent)

    def _parse(self, model: str, message: Any, context: Context) -> Request:
        try:
            return self._request(model, message, context)
        except InvalidRequestError as error:
            self._metrics.refused(error.reason)
            raise

    def _request(self, model: str, message: Any, context: Context) -> Request:
        if not model.startswith(_PREFIX) or model == _PREFIX:
            raise InvalidRequestError("model must have the form models/{model}", field="model")
        if not message.HasField("input"):
            raise InvalidRequestError("input is required", field="input")
        given = message.input
        if given.sampling.HasField("logprobs"):
            raise InvalidRequestError("logprobs are not supported here", field="logprobs")
        latest = self._process.clock.now() + self._request_seconds
        return Request(
            model=model.removeprefix(_PREFIX),
            prompt=prompt_from_proto(given),
            deadline=latest if context.deadline is None else min(context.deadline, latest),
            sampling=sampling_from_proto(given.sampling),
            stop=tuple(given.stop),
            priority=given.priority or context.priority,
            traceparent=parse_traceparent(context.traceparent),
            caller_id=caller_id(context.request_id),
        )


def _send(call: ServerCall, text: str, token_count: int) -> None:
    """Add text to the entry that still waits to go, if there is one."""
    outbox = call.outbox
    delta: Any = outbox.slots.get(call.stream_id)
    if delta is None:
        delta = outbox.next().deltas.add(stream_id=call.stream_id)
        outbox.slots[call.stream_id] = delta
    delta.text += text
    delta.token_count = token_count
    if len(delta.text) > MAX_UNSENT_CHARS:
        raise SlowReaderError("the reader of this request fell behind")
