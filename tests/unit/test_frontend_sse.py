"""Shapes of OpenAI's answers."""

import json
from typing import Any

import pytest

from kvmesh.types import Completion, FinishReason, Usage
from services.frontend.rest.sse import (
    DONE,
    Chat,
    Chunks,
    Shape,
    Text,
    error_event,
    json_text,
    whole,
)

END = Completion(FinishReason.LENGTH, Usage(3, 2, 1))
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def events(data: bytes) -> list[Any]:
    parts = data.split(b"\n\n")
    assert parts.pop() == b""
    return [
        json.loads(part.removeprefix(b"data: ")) for part in parts if part != DONE.rstrip(b"\n")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "\u2028 \u2029 \u0085",
        "a\r\nb\n\n",
        "data: x",
        "🙂",
        '"\\',
        "\x00\x1f",
        "é\u2028",
    ],
)
def test_a45_one_line_of_json_that_reads_back(text: str) -> None:
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1
    (event,) = events(Chunks(Chat, "x", 1, text or "m", usage=False).text(text))
    assert event["choices"][0]["delta"] == {"content": text}


@pytest.mark.parametrize("shape", [Chat, Text])
@pytest.mark.parametrize("usage", [False, True])
def test_a31_chunks_agree(shape: Shape, usage: bool) -> None:
    chunks = Chunks(shape, "abc", 12, "m", usage=usage)
    data = chunks.first() + chunks.text("hi") + chunks.last(END)
    assert data.endswith(DONE)
    got = events(data)
    for event in got:
        assert event["id"] == shape.prefix + "abc"
        assert event["object"] == shape.chunk_kind
        assert (event["created"], event["model"]) == (12, "m")
    choices = [event["choices"][0] for event in got if event["choices"]]
    assert [choice["index"] for choice in choices] == [0] * len(choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    if usage:
        assert [event["usage"] for event in got] == [None] * len(choices) + [USAGE]
        assert got[-1]["choices"] == []
    else:
        assert all("usage" not in event for event in got)


def test_the_role_comes_first_and_once() -> None:
    chunks = Chunks(Chat, "abc", 12, "m", usage=False)
    got = events(chunks.first() + chunks.text("hi") + chunks.last(END))
    assert [event["choices"][0]["delta"] for event in got] == [
        {"role": "assistant", "content": ""},
        {"content": "hi"},
        {},
    ]


def test_whole_answers() -> None:
    chat = json.loads(whole(Chat, "abc", 12, "m", ("hi", END)))
    assert chat["object"] == "chat.completion"
    assert chat["id"] == "chatcmpl-abc"
    assert chat["choices"][0]["message"]["content"] == "hi"
    assert chat["usage"] == USAGE
    text = json.loads(whole(Text, "abc", 12, "m", ("hi", END)))
    assert text["object"] == "text_completion"
    assert text["choices"] == [
        {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}
    ]


def test_an_error_event_has_the_error_at_its_top() -> None:
    assert events(error_event('{"error":{"message":"a\u2028b"}}'.encode())) == [
        {"error": {"message": "a\u2028b"}}
    ]
    assert len(error_event("\u2028".encode()).decode().splitlines()) == 2
