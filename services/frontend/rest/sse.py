"""Answers as server-sent events.

One event is `data: `, one line of JSON, and an empty line. Line separators beyond LF are
escaped in the JSON: there are clients that split lines at them.
"""

import orjson

from kvmesh.types import Completion
from services.frontend.answer import Piece
from services.frontend.rest.answers import Shape, counts_object, finish_of, usage_object
from services.frontend.rest.schemas import Call
from services.frontend.usage import total_usage

DONE = b"data: [DONE]\n\n"

_SEPARATORS = {
    "\N{NEXT LINE}".encode(): b"\\u0085",
    "\N{LINE SEPARATOR}".encode(): b"\\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): b"\\u2029",
}


def json_text(text: str) -> bytes:
    """Return a JSON string without any line separator in it."""
    encoded = orjson.dumps(text)
    return encoded if encoded.isascii() else _on_one_line(encoded)


def error_event(body: bytes) -> bytes:
    """Return the event that tells of a failure after the first byte. No [DONE] follows."""
    return b"data: " + _on_one_line(body) + b"\n\n"


class Chunks:
    """The events of one streamed answer; what they have in common is made once."""

    def __init__(self, shape: Shape, call: Call, created: int) -> None:
        request = call.request
        head = orjson.dumps(
            {
                "id": shape.prefix + request.id,
                "object": shape.chunk_kind,
                "created": created,
                "model": request.model,
            }
        )
        self._shape = shape
        self._call = call
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"
        self._after_text = shape.after_text + self._tail
        self._begun: dict[int, bytes] = {}
        self._completions: dict[int, Completion] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self.complete = False
        """Whether every choice has come to its end."""

    def of(self, piece: Piece) -> bytes:
        """Return the events of the next piece of a choice; may be none."""
        before = self._begun.get(piece.index)
        if before is None or piece.completion is not None or piece.logprobs or self._counts:
            return self._all_of(piece)
        # What nearly every token of nearly every request comes to.
        return before + json_text(piece.text) + self._after_text if piece.text else b""

    def end(self) -> bytes:
        """Return what comes after all choices."""
        if not self._call.include_usage:
            return DONE
        usage = usage_object(total_usage(self._call.request, self._completions))
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE

    def _all_of(self, piece: Piece) -> bytes:
        if self._call.continuous_usage:
            self._count(piece)
        events = b""
        before = self._begun.get(piece.index)
        if before is None:
            before = self._head + self._shape.before_text % piece.index
            self._begun[piece.index] = before
            events = self._opening(piece.index)
        if piece.logprobs:
            events += self._with_logprobs(before, piece)
        elif piece.text:
            events += before + json_text(piece.text) + self._after_text
        if piece.completion is not None:
            events += self._closing(piece.index, piece.completion)
        return events

    def _opening(self, index: int) -> bytes:
        """Return what comes before any text: the role, where the API has one."""
        opening = self._shape.opening
        return self._head + opening % index + self._tail if opening else b""

    def _closing(self, index: int, completion: Completion) -> bytes:
        self._completions[index] = completion
        self.complete = len(self._completions) == self._call.request.choices
        stop = _on_one_line(orjson.dumps(completion.stop))
        closing = self._shape.closing % (index, finish_of(completion).encode(), stop)
        return self._head + closing + self._tail

    def _with_logprobs(self, before: bytes, piece: Piece) -> bytes:
        shape = self._shape
        found = orjson.dumps(shape.logprobs(piece.logprobs, as_ids=self._call.tokens_as_ids))
        middle = shape.before_logprobs + _on_one_line(found) + b',"finish_reason":null}'
        return before + json_text(piece.text) + middle + self._tail

    def _count(self, piece: Piece) -> None:
        """Have this piece's events tell the usage so far, of all choices."""
        prompt, tokens = self._counts.get(piece.index, (0, 0))
        usage = piece.completion.usage if piece.completion is not None else None
        if usage is not None:
            self._counts[piece.index] = usage.prompt_tokens, usage.completion_tokens
        else:
            self._counts[piece.index] = (
                max(prompt, piece.prompt_tokens),
                max(tokens, piece.token_count),
            )
        n = self._call.request.n
        prompts = {index // n: counts[0] for index, counts in self._counts.items()}
        total = sum(counts[1] for counts in self._counts.values())
        so_far = orjson.dumps(counts_object(sum(prompts.values()), total))
        self._tail = b'],"usage":' + so_far + b"}\n\n"
        self._after_text = self._shape.after_text + self._tail


def _on_one_line(encoded: bytes) -> bytes:
    for raw, escaped in _SEPARATORS.items():
        encoded = encoded.replace(raw, escaped)
    return encoded
