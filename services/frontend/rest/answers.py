"""What an answer looks like in OpenAI's API: what its two shapes have each, and whole ones."""

from typing import Any

import orjson

from kvmesh.types import Completion, FinishReason, TextLogprob, Usage
from services.frontend.answer import Piece
from services.frontend.rest.logprobs import chat_logprobs, prompt_logprobs, text_logprobs
from services.frontend.rest.schemas import Call
from services.frontend.usage import total_usage


class Chat:
    """Shapes of `/v1/chat/completions`. Chunks' parts want the choice's index.

    `prompt_with_choice`: a prompt's log probabilities are in its choices, not beside them.
    """

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening = b'{"index":%d,"delta":{"role":"assistant","content":""},"finish_reason":null}'
    before_text = b'{"index":%d,"delta":{"content":'
    after_text = b'},"finish_reason":null}'
    before_logprobs = b'},"logprobs":'
    closing = b'{"index":%d,"delta":{},"finish_reason":"%s","stop_reason":%s}'
    logprobs = staticmethod(chat_logprobs)
    prompt_with_choice = False

    @staticmethod
    def choice(index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """Return a choice of a whole answer, but for how it ended."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs}


class Text:
    """Shapes of `/v1/completions`. Chunks' parts want the choice's index."""

    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"
    opening = b""
    before_text = b'{"index":%d,"text":'
    after_text = b',"logprobs":null,"finish_reason":null}'
    before_logprobs = b',"logprobs":'
    closing = b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%s","stop_reason":%s}'
    logprobs = staticmethod(text_logprobs)
    prompt_with_choice = True

    @staticmethod
    def choice(index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """Return a choice of a whole answer, but for how it ended."""
        return {"index": index, "text": text, "logprobs": logprobs}


Shape = type[Chat] | type[Text]


class Whole:
    """An answer that is not streamed, put together from its pieces."""

    def __init__(self, shape: Shape, call: Call, created: int) -> None:
        self._shape = shape
        self._call = call
        self._created = created
        choices = range(call.request.choices)
        self._texts: list[list[str]] = [[] for _ in choices]
        self._logprobs: list[list[TextLogprob]] = [[] for _ in choices]
        self._prompts: dict[int, tuple[TextLogprob, ...]] = {}
        self._completions: dict[int, Completion] = {}

    def add(self, piece: Piece) -> None:
        """Take the next piece of a choice."""
        self._texts[piece.index].append(piece.text)
        self._logprobs[piece.index].extend(piece.logprobs)
        if piece.prompt_logprobs:
            self._prompts[piece.index] = piece.prompt_logprobs
        if piece.completion is not None:
            self._completions[piece.index] = piece.completion

    def body(self) -> bytes:
        """Return the answer, when every choice has come to its end."""
        request = self._call.request
        return orjson.dumps(
            {
                "id": self._shape.prefix + request.id,
                "object": self._shape.kind,
                "created": self._created,
                "model": request.model,
                "choices": [self._choice(index) for index in range(request.choices)],
                "usage": usage_object(total_usage(request, self._completions)),
                **(self._prompt(0) if not self._shape.prompt_with_choice else {}),
            }
        )

    def _choice(self, index: int) -> dict[str, Any]:
        call = self._call
        logprobs = None
        if call.request.sampling.logprobs is not None:
            logprobs = self._shape.logprobs(self._logprobs[index], as_ids=call.tokens_as_ids)
        text = "".join(self._texts[index])
        completion = self._completions[index]
        return {
            **self._shape.choice(index, text, logprobs),
            "finish_reason": finish_of(completion),
            "stop_reason": completion.stop,
            **(self._prompt(index) if self._shape.prompt_with_choice else {}),
        }

    def _prompt(self, index: int) -> dict[str, Any]:
        """Return what is told of the prompt of a choice: it came with the prompt's first."""
        entries = self._prompts.get(index - index % self._call.request.n)
        return {"prompt_logprobs": prompt_logprobs(entries)} if entries else {}


def finish_of(completion: Completion) -> str:
    """Return the name of how a choice ended."""
    return (completion.finish_reason or FinishReason.STOP).value


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return token counts as the API has them."""
    return {
        **counts_object(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def counts_object(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return token counts of which nothing more is known yet."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
