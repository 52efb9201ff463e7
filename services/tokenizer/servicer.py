"""TokenizerService: the two multiplexed streams over the pure cores.

`Tokenize` hands its work to threads. `Detokenize` is the hot path, a few microseconds a
token, and runs in the event loop: one text delta for each request and message.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from kvmesh.clock import Clock
from kvmesh.errors import (
    CancelledByCallerError,
    InternalError,
    InvalidRequestError,
    MeshError,
    RequestTooLargeError,
    UnknownModelError,
)
from kvmesh.kv.blocks import block_hashes
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.serving import Identity, ServerCall, ServerStream
from kvmesh.rpc.specs import DETOKENIZE, TOKENIZE
from kvmesh.telemetry import Meter, Span, Tracer
from kvmesh.types import Completion, FinishReason, Usage
from kvmesh.v1 import generation_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from kvmesh.wire import prompt_from_proto
from kvmesh.wire_logprobs import logprobs_from_proto, text_logprobs_to_proto
from services.tokenizer.codec import Codec
from services.tokenizer.completion import CompletionText, ScoredText
from services.tokenizer.config import LimitsConfig
from services.tokenizer.lanes import Job, Lanes
from services.tokenizer.stops import StopMatcher

log = logging.getLogger(__name__)

SERVICE_NAME: str = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name


@dataclass(frozen=True, slots=True)
class Host:
    """What the servicer needs of the process it runs in."""

    identity: Identity
    gate: Gate
    clock: Clock
    tracer: Tracer
    meter: Meter


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves one model's tokenizer under the name `model`."""

    def __init__(
        self, codec: Codec, model: str, lanes: Lanes, host: Host, limits: LimitsConfig
    ) -> None:
        """Take what is served, and the lanes that encode; both outlive the servicer."""
        self._codec = codec
        self._model = model
        self._lanes = lanes
        self._host = host
        self._limits = limits
        self._metrics = _Metrics(host.meter, lanes, model)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        add: Any = tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server
        add(self, server)

    async def Tokenize(self, request_iterator: Any, context: Any) -> None:
        """Encode prompts."""
        host = self._host
        stream = ServerStream(
            TOKENIZE, self._encode, identity=host.identity, gate=host.gate, clock=host.clock
        )
        await stream.run(request_iterator, context)

    async def Detokenize(self, request_iterator: Any, context: Any) -> None:
        """Turn completions into text."""
        host = self._host
        texts = _Texts(self._metrics)
        stream = ServerStream(
            DETOKENIZE,
            partial(self._open_text, texts),
            identity=host.identity,
            gate=host.gate,
            clock=host.clock,
            feed=texts.feed,
        )
        await stream.run(request_iterator, context)

    def _encode(self, start: tokenizer_pb2.TokenizeStart, call: ServerCall) -> None:
        self._check_model(start.model)
        _check_size(start.bad_words, self._limits.max_bad_word_chars, "bad_words")
        span = self._host.tracer.span("encode", call.context.traceparent)
        job = Job(
            size=start.ByteSize(),
            work=partial(self._encoded, start),
            done=partial(self._finish_encoding, call, span),
            slow=bool(start.chat.template),
        )
        call.on_cancel = partial(_cancel_job, job, span)
        try:
            self._lanes.submit(job)
        except MeshError as error:
            span.end(error)
            raise

    def _encoded(self, start: tokenizer_pb2.TokenizeStart) -> tokenizer_pb2.TokenizeResult:
        """Encode, in a lane's thread: reading and building long messages takes time, too."""
        ids = self._codec.encode(prompt_from_proto(start), truncate_to=start.truncate_to)
        size = start.block_size
        hashes = block_hashes(ids, size, self._model) if size else ()
        result = tokenizer_pb2.TokenizeResult(
            stream_id=start.stream_id, token_ids=ids, block_hashes=hashes
        )
        for sequence in self._codec.encode_bad_words(start.bad_words):
            result.bad_words.add(ids=sequence)
        return result

    def _finish_encoding(
        self, call: ServerCall, span: Span, outcome: tokenizer_pb2.TokenizeResult | MeshError
    ) -> None:
        if isinstance(outcome, MeshError):
            span.end(outcome)
            call.fail(outcome)
            return
        count = len(outcome.token_ids)
        self._metrics.encoded_tokens += count
        span.set("kvmesh.prompt_tokens", count)
        span.end()
        call.outbox.next().results.append(outcome)
        call.end(Completion())

    def _open_text(
        self, texts: "_Texts", start: tokenizer_pb2.DetokenizeStart, call: ServerCall
    ) -> None:
        self._check_model(start.model)
        matcher = None
        if start.stop:
            _check_size(start.stop, self._limits.max_stop_chars, "stop")
            matcher = StopMatcher(start.stop, include_stop=start.include_stop)
        detokenizer = self._codec.detokenizer(keep_special=start.keep_special)
        span = self._host.tracer.span("detokenize", call.context.traceparent)
        text = CompletionText(detokenizer, matcher, min_tokens=start.min_tokens)
        texts.open(call, text, span)

    def _check_model(self, model: str) -> None:
        if model != self._model:
            raise UnknownModelError(f"the model {model!r} is not served here", field="model")


@dataclass(slots=True)
class _OpenText:
    """A completion that has not ended. `plain`: its tokens come without log probabilities."""

    text: CompletionText
    call: ServerCall
    span: Span
    plain: bool = False


class _Texts:
    """The completions of one Detokenize stream.

    The first delta of each says whether its tokens come with log probabilities.
    """

    def __init__(self, metrics: "_Metrics") -> None:
        self._open: dict[int, _OpenText] = {}
        self._metrics = metrics

    def open(self, call: ServerCall, text: CompletionText, span: Span) -> None:
        """Add a completion; it stays until its call ends."""
        self._open[call.stream_id] = _OpenText(text, call, span)
        call.on_cancel = partial(self._cancelled, call.stream_id)

    def feed(self, message: tokenizer_pb2.DetokenizeRequest, stream: Any) -> None:
        """Take a client's message. What is for an ended or unknown id is passed over."""
        for delta in message.deltas:
            found = self._open.get(delta.stream_id)
            if found is not None:
                self._advance(found, delta)
        for stream_id in message.finishes:
            found = self._open.get(stream_id)
            if found is not None:
                self._advance(found, None)

    def _advance(self, found: _OpenText, delta: generation_pb2.TokenDelta | None) -> None:
        """Take a completion's next tokens, or with None its end."""
        try:
            if found.plain or self._settle(found, delta):
                text = found.text
                piece = (
                    text.push(delta.offset, delta.token_ids) if delta is not None else text.finish()
                )
                if piece:
                    _send(found.call, piece, text.token_count)
            else:
                text = self._advance_scored(found, delta)
        except MeshError as error:
            self._fail(found, error)
            return
        except Exception:  # top of a request
            log.exception("request %s failed", found.call.context.request_id)
            self._fail(found, InternalError("internal error"))
            return
        if delta is None or text.stop_string is not None:
            self._end(found)

    def _settle(self, found: _OpenText, delta: generation_pb2.TokenDelta | None) -> bool:
        """Settle, with its first delta, whether a completion is plain; return that."""
        scored = isinstance(found.text, ScoredText)
        if not scored and delta is not None and delta.logprobs:
            found.text = found.text.scored()
            scored = True
        found.plain = not scored
        return found.plain

    def _advance_scored(
        self, found: _OpenText, delta: generation_pb2.TokenDelta | None
    ) -> CompletionText:
        text, call = found.text, found.call
        assert isinstance(text, ScoredText)
        if delta is None:
            piece, logprobs = text.finish_scored()
        else:
            rows = logprobs_from_proto(delta)
            piece, logprobs = text.push_scored(delta.offset, delta.token_ids, rows)
        if piece or logprobs:
            _send(call, piece, text.token_count)
            entry: Any = call.outbox.slots[call.stream_id]
            text_logprobs_to_proto(logprobs, entry)
        return text

    def _end(self, found: _OpenText) -> None:
        call, count, stop = found.call, found.text.token_count, found.text.stop_string
        self._close(call.stream_id)
        reason = FinishReason.STOP if stop is not None else None
        call.end(Completion(reason, Usage(0, count), stop))

    def _fail(self, found: _OpenText, error: MeshError) -> None:
        self._close(found.call.stream_id, error)
        found.call.fail(error)

    def _cancelled(self, stream_id: int) -> None:
        self._close(stream_id, CancelledByCallerError("cancelled"))

    def _close(self, stream_id: int, error: MeshError | None = None) -> None:
        found = self._open.pop(stream_id)
        self._metrics.decoded_tokens += found.text.token_count
        found.span.set("kvmesh.completion_tokens", found.text.token_count)
        found.span.end(error)


class _Metrics:
    """Counts that are kept as plain numbers: they are touched for every request."""

    def __init__(self, meter: Meter, lanes: Lanes, model: str) -> None:
        self.encoded_tokens = 0
        self.decoded_tokens = 0
        # A process has one model, so one label set: requests for others are refused.
        labels = ("model",)
        meter.counter_from(
            "kvmesh_encoded_tokens",
            "Prompt tokens encoded.",
            lambda: {(model,): float(self.encoded_tokens)},
            labels=labels,
        )
        meter.counter_from(
            "kvmesh_detokenized_tokens",
            "Completion tokens turned into text, counted when a completion ends.",
            lambda: {(model,): float(self.decoded_tokens)},
            labels=labels,
        )
        meter.gauge(
            "kvmesh_encode_waiting",
            "Prompts that wait to be encoded.",
            lambda: {(model,): float(lanes.waiting)},
            labels=labels,
        )


def _send(call: ServerCall, piece: str, token_count: int) -> None:
    """Send text, in the entry of this request that still waits to go if there is one."""
    outbox, stream_id = call.outbox, call.stream_id
    entry: Any = outbox.slots.get(stream_id)
    if entry is not None:
        entry.text += piece
        entry.token_count = token_count
        return
    # Set one by one: a fifth faster than as arguments of `add`.
    outbox.slots[stream_id] = entry = outbox.next().deltas.add()
    entry.stream_id, entry.text, entry.token_count = stream_id, piece, token_count


def _check_size(texts: Sequence[str], most: int, field: str) -> None:
    """Refuse strings of a request that are empty or have too many characters in all."""
    if not all(texts):
        raise InvalidRequestError(f"{field} has an empty string", field=field)
    if sum(map(len, texts)) > most:
        raise RequestTooLargeError(f"{field} may have {most} characters in all", field=field)


def _cancel_job(job: Job[Any], span: Span) -> None:
    job.cancelled = True
    span.end(CancelledByCallerError("cancelled"))
