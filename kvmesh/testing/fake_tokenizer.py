"""A tokenizer service whose tokens are the bytes of UTF-8."""

import asyncio
import codecs
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.serving import ServerCall
from kvmesh.rpc.specs import DETOKENIZE, TOKENIZE
from kvmesh.testing.fakes import MODEL, Fake
from kvmesh.types import (
    ChatPrompt,
    Completion,
    FinishReason,
    Role,
    TextLogprob,
    TextPrompt,
    TokenScore,
    Usage,
)
from kvmesh.v1 import tokenizer_pb2_grpc
from kvmesh.wire import prompt_from_proto
from kvmesh.wire_logprobs import logprobs_from_proto, text_logprobs_to_proto


def encode(prompt: Any) -> list[int]:
    """Return the tokens of a prompt, as the fake tokenizer does."""
    if isinstance(prompt, TextPrompt):
        return list(prompt.text.encode())
    if isinstance(prompt, ChatPrompt):
        lines = [f"{message.role}:{message.content}" for message in prompt.messages]
        return list("\n".join(lines).encode())
    return list(prompt.token_ids)


class FakeTokenizer(Fake):
    """Encodes to bytes and back. A chat is rendered as `role:content` lines."""

    role = Role.TOKENIZER

    def __init__(self, model: str = MODEL) -> None:
        super().__init__(model=model)
        self.hold: asyncio.Event | None = None
        self.unfinished = False
        """Whether texts are never finished."""
        self.texts: dict[tuple[int, int], _FakeText] = {}
        self.detokenizes: list[Any] = []

    def registrations(self) -> dict[str, Any]:
        """Return the one service."""
        add = tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server
        return {"kvmesh.v1.TokenizerService": partial(add, self)}

    async def Tokenize(self, requests: Any, context: Any) -> None:
        """Serve the rpc."""
        await self.stream(TOKENIZE, self._tokenize).run(requests, context)

    async def Detokenize(self, requests: Any, context: Any) -> None:
        """Serve the rpc."""
        await self.stream(DETOKENIZE, self._open, self._feed).run(requests, context)

    def _tokenize(self, start: Any, call: ServerCall) -> None:
        self.starts.append(start)
        if self.refuses is not None:
            raise self.refuses
        call.spawn(self._encode(start, call))

    async def _encode(self, start: Any, call: ServerCall) -> Completion:
        with self.running(call):
            if self.hold is not None:
                await self.hold.wait()
            ids = encode(prompt_from_proto(start))[-start.truncate_to :]
            if not ids:
                raise InvalidRequestError("the prompt has no tokens", field="prompt")
            result = call.outbox.next().results.add(stream_id=call.stream_id, token_ids=ids)
            size = start.block_size
            if size:
                result.block_hashes.extend(range(1, len(ids) // size + 1))
            for word in start.bad_words:
                result.bad_words.add(ids=word.encode())
        return Completion()

    def _open(self, start: Any, call: ServerCall) -> None:
        self.detokenizes.append(start)
        text = _FakeText(call, start)
        key = (id(call.outbox), call.stream_id)
        self.texts[key] = text
        call.on_cancel = partial(self._cancelled, key)

    def _feed(self, message: Any, stream: Any) -> None:
        for delta in message.deltas:
            text = self.texts.get((id(stream.outbox), delta.stream_id))
            if text is not None and text.push(delta):
                del self.texts[id(stream.outbox), delta.stream_id]
        for stream_id in () if self.unfinished else message.finishes:
            text = self.texts.pop((id(stream.outbox), stream_id), None)
            if text is not None:
                text.finish()

    def _cancelled(self, key: tuple[int, int]) -> None:
        self.cancelled.append(self.texts.pop(key).call.context.request_id)


class _FakeText:
    def __init__(self, call: ServerCall, start: Any) -> None:
        self.call = call
        self._stops: list[str] = sorted(start.stop, key=len, reverse=True)
        self._start = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._sent = 0
        self._count = 0
        self._logprobs: deque[tuple[int, TextLogprob]] = deque()
        """Of the tokens that are not sent: each with where its text ends."""

    def push(self, delta: Any) -> bool:
        """Take tokens; whether a stop string has ended the text."""
        if not self._stops and not delta.logprobs:
            # Nothing of it has to be kept: tests send megabytes.
            self._count += len(delta.token_ids)
            self._text = self._decoder.decode(b"".join(map(_bytes, delta.token_ids)))
            self._sent = 0
            self._send(len(self._text), ())
            return False
        rows = logprobs_from_proto(delta) or repeat(None)
        for token, row in zip(delta.token_ids, rows, strict=False):
            begin = len(self._text)
            self._count += 1
            self._text += self._decoder.decode(_bytes(token))
            if row is not None:
                pending, _ = self._decoder.getstate()
                entry = TextLogprob(_score(token, row.logprob), begin, _scores(row.top), row.rank)
                self._logprobs.append((len(self._text) + bool(pending), entry))
            stop = self._stop()
            if stop is not None and len(self._text) > begin:
                self._end_at(stop)
                return True
        held = max((self._overlap(stop) for stop in self._stops), default=0)
        end = len(self._text) - held
        due = []
        while self._logprobs and self._logprobs[0][0] <= end:
            due.append(self._logprobs.popleft()[1])
        self._send(end, due)
        return False

    def finish(self) -> None:
        """End."""
        self._text += self._decoder.decode(b"", True)
        self._send(len(self._text), [entry for _, entry in self._logprobs])
        self.call.end(Completion(usage=Usage(0, self._count)))

    def _stop(self) -> str | None:
        if self._count <= self._start.min_tokens:
            return None
        return next((stop for stop in self._stops if self._text.endswith(stop)), None)

    def _end_at(self, stop: str) -> None:
        end = len(self._text) - (0 if self._start.include_stop else len(stop))
        self._send(end, [entry for _, entry in self._logprobs if entry.offset < end])
        self.call.end(Completion(FinishReason.STOP, Usage(0, self._count), stop))

    def _overlap(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self._text)), 0, -1)
        return next((size for size in sizes if self._text.endswith(stop[:size])), 0)

    def _send(self, end: int, logprobs: Sequence[TextLogprob]) -> None:
        text = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        if text or logprobs:
            delta = self.call.outbox.next().deltas.add(
                stream_id=self.call.stream_id, text=text, token_count=self._count
            )
            text_logprobs_to_proto(logprobs, delta)


def _bytes(token: int) -> bytes:
    return bytes([token % 256])


def _score(token: int, logprob: float) -> TokenScore:
    return TokenScore(token, _bytes(token), logprob)


def _scores(top: Sequence[tuple[int, float]]) -> tuple[TokenScore, ...]:
    return tuple(_score(token, logprob) for token, logprob in top)
