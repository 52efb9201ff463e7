"""A tokenizer service whose tokens are the bytes of UTF-8."""

import asyncio
import codecs
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.serving import ServerCall
from kvmesh.rpc.specs import DETOKENIZE, TOKENIZE
from kvmesh.testing.fakes import MODEL, Fake
from kvmesh.types import ChatPrompt, Completion, FinishReason, Role, TextPrompt, Usage
from kvmesh.v1 import tokenizer_pb2_grpc
from kvmesh.wire import prompt_from_proto


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
            ids = encode(prompt_from_proto(start))
            if not ids:
                raise InvalidRequestError("the prompt has no tokens", field="prompt")
            result = call.outbox.next().results.add(stream_id=call.stream_id, token_ids=ids)
            size = start.block_size
            if size:
                result.block_hashes.extend(range(1, len(ids) // size + 1))
        return Completion()

    def _open(self, start: Any, call: ServerCall) -> None:
        self.detokenizes.append(start)
        text = _FakeText(call, list(start.stop), include_stop=start.include_stop)
        key = (id(call.outbox), call.stream_id)
        self.texts[key] = text
        call.on_cancel = partial(self._cancelled, key)

    def _feed(self, message: Any, stream: Any) -> None:
        for delta in message.deltas:
            text = self.texts.get((id(stream.outbox), delta.stream_id))
            if text is not None and text.push(delta.token_ids):
                del self.texts[id(stream.outbox), delta.stream_id]
        for stream_id in message.finishes:
            text = self.texts.pop((id(stream.outbox), stream_id), None)
            if text is not None:
                text.finish()

    def _cancelled(self, key: tuple[int, int]) -> None:
        self.cancelled.append(self.texts.pop(key).call.context.request_id)


class _FakeText:
    def __init__(self, call: ServerCall, stops: list[str], *, include_stop: bool) -> None:
        self.call = call
        self._stops = stops
        self._include = include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._sent = 0
        self._count = 0

    def push(self, token_ids: Sequence[int]) -> bool:
        """Take tokens; whether a stop string has ended the text."""
        if not self._stops:
            self._count += len(token_ids)
            self._write(self._decoder.decode(bytes([token % 256 for token in token_ids])))
            return False
        for token in token_ids:
            self._count += 1
            self._text += self._decoder.decode(bytes([token % 256]))
            for stop in self._stops:
                if self._text.endswith(stop):
                    cut = len(self._text) - (0 if self._include else len(stop))
                    self._send(cut)
                    usage = Usage(0, self._count)
                    self.call.end(Completion(FinishReason.STOP, usage, stop))
                    return True
        held = max((self._overlap(stop) for stop in self._stops), default=0)
        self._send(len(self._text) - held)
        return False

    def finish(self) -> None:
        """End."""
        self._text += self._decoder.decode(b"", True)
        self._send(len(self._text))
        self.call.end(Completion(usage=Usage(0, self._count)))

    def _overlap(self, stop: str) -> int:
        sizes = range(min(len(stop), len(self._text)), 0, -1)
        return next((size for size in sizes if self._text.endswith(stop[:size])), 0)

    def _send(self, end: int) -> None:
        self._write(self._text[self._sent : end])
        self._sent = max(self._sent, end)

    def _write(self, text: str) -> None:
        if text:
            self.call.outbox.next().deltas.add(
                stream_id=self.call.stream_id, text=text, token_count=self._count
            )
