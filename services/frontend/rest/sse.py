"""What an answer looks like in OpenAI's API: whole, or as server-sent events.

One event is `data: `, one line of JSON, and an empty line. Line separators beyond LF are
escaped in the JSON: there are clients that split lines at them.
"""

from typing import Any

import orjson

from kvmesh.types import Completion, FinishReason, Usage

DONE = b"data: [DONE]\n\n"

_SEPARATORS = {
    "\N{NEXT LINE}".encode(): b"\\u0085",
    "\N{LINE SEPARATOR}".encode(): b"\\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): b"\\u2029",
}


def json_text(text: str) -> bytes:
    """Return a JSON string without any line separator in it."""
    encoded = orjson.dumps(text)
    if len(encoded) > len(text) + 2:  # not all ASCII, or something was escaped
        for raw, escaped in _SEPARATORS.items():
            encoded = encoded.replace(raw, escaped)
    return encoded


def error_event(body: bytes) -> bytes:
    """Return the event that tells of a failure after the first byte. No [DONE] follows."""
    for raw, escaped in _SEPARATORS.items():
        body = body.replace(raw, escaped)
    return b"data: " + body + b"\n\n"


class Chat:
    """Shapes of `/v1/chat/completions`."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    first_choice = b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
    before_text = b'{"index":0,"delta":{"content":'
    after_text = b'},"finish_reason":null}'
    last_choice = b'{"index":0,"delta":{},"finish_reason":"%s"}'

    @staticmethod
    def choice(text: str, finish: str) -> dict[str, Any]:
        """Return the one choice of a whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}


class Text:
    """Shapes of `/v1/completions`."""

    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"
    first_choice = b""
    before_text = b'{"index":0,"text":'
    after_text = b',"logprobs":null,"finish_reason":null}'
    last_choice = b'{"index":0,"text":"","logprobs":null,"finish_reason":"%s"}'

    @staticmethod
    def choice(text: str, finish: str) -> dict[str, Any]:
        """Return the one choice of a whole answer."""
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


Shape = type[Chat] | type[Text]


class Chunks:
    """The events of one streamed answer; what they have in common is made once."""

    def __init__(
        self, shape: Shape, request_id: str, created: int, model: str, *, usage: bool
    ) -> None:
        head = orjson.dumps(
            {
                "id": shape.prefix + request_id,
                "object": shape.chunk_kind,
                "created": created,
                "model": model,
            }
        )
        self._usage = usage
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._shape = shape
        self._before = self._head + shape.before_text
        self._after = shape.after_text + self._tail

    def first(self) -> bytes:
        """Return what comes before any text: the role, where the API has one."""
        choice = self._shape.first_choice
        return self._head + choice + self._tail if choice else b""

    def text(self, text: str) -> bytes:
        """Return some text as an event."""
        return self._before + json_text(text) + self._after

    def last(self, completion: Completion) -> bytes:
        """Return what comes after all text."""
        choice = self._shape.last_choice % _finish(completion).encode()
        events = self._head + choice + self._tail
        if self._usage:
            usage = orjson.dumps(_usage(completion.usage))
            events += self._head + b'],"usage":' + usage + b"}\n\n"
        return events + DONE


def whole(
    shape: Shape, request_id: str, created: int, model: str, answer: tuple[str, Completion]
) -> bytes:
    """Return an answer that is not streamed."""
    text, completion = answer
    return orjson.dumps(
        {
            "id": shape.prefix + request_id,
            "object": shape.kind,
            "created": created,
            "model": model,
            "choices": [shape.choice(text, _finish(completion))],
            "usage": _usage(completion.usage),
        }
    )


def _finish(completion: Completion) -> str:
    return (completion.finish_reason or FinishReason.STOP).value


def _usage(usage: Usage | None) -> dict[str, Any]:
    counts = usage or Usage(0, 0)
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }
