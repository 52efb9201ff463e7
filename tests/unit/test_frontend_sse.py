"""Shapes of OpenAI's answers, streamed and whole."""

import json
import math
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.types import (
    Completion,
    FinishReason,
    Prompt,
    Sampling,
    TextLogprob,
    TextPrompt,
    TokenScore,
    Usage,
)
from services.frontend.answer import Piece
from services.frontend.request import Request
from services.frontend.rest.answers import Chat, Shape, Text, Whole
from services.frontend.rest.schemas import Call
from services.frontend.rest.sse import DONE, Chunks, error_event, json_text

SHAPES = [Chat, Text]


def call(prompts: int = 1, n: int = 1, logprobs: int | None = None, **more: Any) -> Call:
    given: tuple[Prompt, ...] = tuple(TextPrompt(f"prompt {at}") for at in range(prompts))
    sampling = Sampling(logprobs=logprobs)
    return Call(Request("m", given, 1.0, sampling, n=n, id="abc"), stream=True, **more)


def end(
    index: int = 0, text: str = "", *, tokens: int = 2, prompt: int = 3, cached: int = 1
) -> Piece:
    completion = Completion(FinishReason.LENGTH, Usage(prompt, tokens, cached))
    return Piece(text, tokens, completion, index, (), prompt)


def said(text: str, index: int = 0, count: int = 1, prompt: int = 3) -> Piece:
    return Piece(text, count, None, index, (), prompt)


def streamed(shape: Shape, asked: Call, pieces: list[Piece]) -> bytes:
    chunks = Chunks(shape, asked, 12)
    data = b""
    for piece in pieces:
        assert not chunks.complete
        data += chunks.of(piece)
    assert chunks.complete
    return data + chunks.end()


def whole(shape: Shape, asked: Call, pieces: list[Piece]) -> Any:
    answer = Whole(shape, asked, 12)
    for piece in pieces:
        answer.add(piece)
    return json.loads(answer.body())


def events(data: bytes) -> list[Any]:
    parts = data.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [
        json.loads(part.removeprefix(b"data: ")) for part in parts if part != DONE.rstrip(b"\n")
    ]


def text_of(choice: Any) -> str:
    text: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


@pytest.mark.parametrize(
    "text",
    [
        *("", "plain", "\u2028 \u2029 \u0085", "a\r\nb\n\n", "data: x", "🙂", '"\\'),
        *("\x00\x1f", "é\u2028", "\x7f", "\ufffd", ": keep-alive\n\n"),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a45_one_line_of_json_that_reads_back(shape: Shape, text: str) -> None:
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1
    data = streamed(shape, call(), [said(text), said(text), end(text=text)])
    assert "".join(text_of(e["choices"][0]) for e in events(data)) == 3 * text
    assert all(line.startswith("data: ") for line in data.decode().splitlines() if line)


@given(st.text())
def test_a45_any_text_is_one_line(text: str) -> None:
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a31_chunks_of_several_choices_agree(shape: Shape, order: tuple[int, ...]) -> None:
    asked = call(prompts=1, n=3, include_usage=True)
    pieces = [said(f"a{i}", i) for i in range(3)]
    pieces += [said(f"b{i}", i, 2) for i in order]
    pieces += [end(i, f"c{i}") for i in order]
    got = events(streamed(shape, asked, pieces))
    assert len({(e["id"], e["object"], e["created"], e["model"]) for e in got}) == 1
    assert (got[0]["id"], got[0]["created"]) == (shape.prefix + "abc", 12)
    *told, last = got
    assert last["choices"] == []
    assert all(len(e["choices"]) == 1 for e in told)
    choices = [e["choices"][0] for e in told]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(map(text_of, own)) == f"a{index}b{index}c{index}"
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        if shape is Chat:
            roles = [c["delta"].get("role") for c in own]
            assert roles == ["assistant"] + [None] * (len(own) - 1)
            assert own[0]["delta"]["content"] == ""


def test_a_single_choice_keeps_its_chunks() -> None:
    data = streamed(Chat, call(), [said("hi"), said(""), end()])
    assert [event["choices"][0]["delta"] for event in events(data)] == [
        {"role": "assistant", "content": ""},
        {"content": "hi"},
        {},
    ]
    assert data.endswith(DONE)
    assert data.count(DONE) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a30_only_asked_for_usage_is_told(shape: Shape) -> None:
    pieces = [said("a"), said("b", count=2), end()]
    assert all("usage" not in e for e in events(streamed(shape, call(), pieces)))
    *told, last = events(streamed(shape, call(include_usage=True), pieces))
    assert [e["usage"] for e in told] == [None] * len(told)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert last["usage"] == whole(shape, call(), pieces)["usage"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a30_continuous_usage_is_of_all_choices_so_far(shape: Shape) -> None:
    asked = call(prompts=2, n=2, include_usage=True, continuous_usage=True)
    pieces = [
        *(said("a", 0, 1), said("b", 2, 4, prompt=7), said("c", 0, 2), said("", 0, 0)),
        *(said("d", 1, 1), end(0, tokens=2), said("e", 3, 1, prompt=7)),
        *(end(1, tokens=5), end(2, tokens=4, prompt=7), end(3, tokens=9, prompt=7)),
    ]
    *told, last = events(streamed(shape, asked, pieces))
    counts = [(e["usage"]["prompt_tokens"], e["usage"]["completion_tokens"]) for e in told]
    assert counts == sorted(counts)
    assert counts[0] == (3, 1)
    assert (10, 6) in counts
    assert counts[-1] == (10, 20)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (10, 20)
    assert all(
        sum(count) == e["usage"]["total_tokens"] for count, e in zip(counts, told, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("prompts", "n"), [(1, 3), (3, 1), (2, 2)])
def test_a55_usage_counts_a_prompt_once_and_every_choice(
    shape: Shape, prompts: int, n: int
) -> None:
    pieces = []
    for index in reversed(range(prompts * n)):
        # Counts of tokens so far: neither their sum nor the number of pieces is meant.
        pieces += [said("ab", index, 2), said("cd", index, 4), end(index, tokens=4)]
    asked = call(prompts=prompts, n=n, include_usage=True)
    usage = whole(shape, asked, pieces)["usage"]
    assert usage["prompt_tokens"] == 3 * prompts
    assert usage["completion_tokens"] == 4 * prompts * n
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert events(streamed(shape, asked, pieces))[-1]["usage"] == usage


def test_whole_answers() -> None:
    pieces = [said("h", 1), said("x", 0), end(1, "i"), end(0)]
    chat = whole(Chat, call(n=2), pieces)
    assert (chat["id"], chat["object"], chat["created"]) == ("chatcmpl-abc", "chat.completion", 12)
    assert chat["choices"] == [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        for index, text in enumerate(("x", "hi"))
    ]
    text = whole(Text, call(n=2), pieces)
    assert (text["id"], text["object"]) == ("cmpl-abc", "text_completion")
    assert text["choices"] == [
        {
            "index": index,
            "text": said,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        for index, said in enumerate(("x", "hi"))
    ]


# Log probabilities


def entry(token: int, text: bytes, logprob: float | None, offset: int = 0, *top: Any) -> Any:
    scores = tuple(TokenScore(*one) for one in top)
    return TextLogprob(TokenScore(token, text, logprob), offset, scores)


E_ACUTE = "é".encode()
TOP = ((1, b"a", -0.1), (2, b"b", -2.5))
ENTRIES = [
    entry(1, b"a", -0.1, 0, *TOP),
    entry(3, b"c", -7.25, 1, *TOP),
    entry(4, E_ACUTE[:1], -0.5, 2, (4, E_ACUTE[:1], -0.5), (9, E_ACUTE[:1] + b"!", -1.0)),
    entry(5, E_ACUTE[1:], -1e-9, 2, (5, E_ACUTE[1:], -1e-9), (6, b"\xbf", -9.0)),
]
PIECES = [
    Piece("a", 1, None, 0, (ENTRIES[0],), 3),
    Piece("", 2, None, 0, (ENTRIES[1],), 3),
    Piece("cé", 4, None, 0, tuple(ENTRIES[2:]), 3),
    end(tokens=4),
]


def test_a57_every_token_of_a_chat_is_told_once_and_in_order() -> None:
    asked = call(logprobs=2)
    content = whole(Chat, asked, PIECES)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content) == "acé".encode()
    assert [one["token"] for one in content] == ["a", "c", "\ufffd", "\ufffd"]
    assert [one["logprob"] for one in content] == [-0.1, -7.25, -0.5, 0.0]
    assert content[1]["top_logprobs"] == [
        {"token": "a", "logprob": -0.1, "bytes": [97]},
        {"token": "b", "logprob": -2.5, "bytes": [98]},
    ]
    choices = [e["choices"][0] for e in events(streamed(Chat, asked, PIECES))]
    told = [one for c in choices if c.get("logprobs") for one in c["logprobs"]["content"]]
    assert told == content
    assert "".join(map(text_of, choices)) == "acé"
    assert all(c["logprobs"]["refusal"] is None for c in choices if c.get("logprobs"))


def test_a57_every_token_of_a_completion_is_told_once_and_in_order() -> None:
    asked = call(logprobs=2)
    logprobs = whole(Text, asked, PIECES)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "c", "\ufffd", "\ufffd"]
    assert logprobs["token_logprobs"] == [-0.1, -7.25, -0.5, 0.0]
    assert logprobs["text_offset"] == [0, 1, 2, 2]
    # The sampled token is among them though it is none of the likeliest.
    assert logprobs["top_logprobs"][1] == {"a": -0.1, "b": -2.5, "c": -7.25}
    assert logprobs["top_logprobs"][3] == {"\ufffd": 0.0}
    told: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in events(streamed(Text, asked, PIECES)):
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            told[name] += values
    assert told == logprobs


def test_a57_an_answer_without_tokens_has_empty_logprobs() -> None:
    pieces = [end(tokens=0)]
    assert whole(Chat, call(logprobs=1), pieces)["choices"][0]["logprobs"]["content"] == []
    assert whole(Text, call(logprobs=1), pieces)["choices"][0]["logprobs"]["tokens"] == []


def test_a57_logprobs_that_come_with_the_end() -> None:
    last = Piece("d", 1, end().completion, 0, (entry(7, b"d", -1.0),), 3)
    for shape in SHAPES:
        choices = [e["choices"][0] for e in events(streamed(shape, call(logprobs=0), [last]))]
        assert "".join(map(text_of, choices)) == "d"
        assert [bool(c.get("logprobs")) for c in choices[-2:]] == [True, False]


def test_tokens_are_named_by_their_ids_where_asked_for() -> None:
    asked = call(logprobs=2, tokens_as_ids=True)
    chat = whole(Chat, asked, PIECES)["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in chat] == [f"token_id:{i}" for i in (1, 3, 4, 5)]
    assert chat[0]["top_logprobs"][1]["token"] == "token_id:2"
    text = whole(Text, asked, PIECES)["choices"][0]["logprobs"]
    assert text["top_logprobs"][3] == {"token_id:5": 0.0, "token_id:6": -9.0}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("streams", [False, True])
def test_a36_logprobs_are_numbers_that_json_has(shape: Shape, streams: bool) -> None:
    odd = [-math.inf, math.nan, -1e300, -0.0, -1e-12, -0.123456789, -9999.0]
    entries = [entry(i, b"x", value, i, (1, b"y", value)) for i, value in enumerate(odd)]
    piece = Piece("x" * len(odd), len(odd), end().completion, 0, tuple(entries), 3)
    if streams:
        data = streamed(shape, call(logprobs=1), [piece])
        assert b"NaN" not in data
        assert b"-0.0," not in data
        found = next(
            e["choices"][0]["logprobs"] for e in events(data) if e["choices"][0].get("logprobs")
        )
    else:
        found = whole(shape, call(logprobs=1), [piece])["choices"][0]["logprobs"]
    if shape is Chat:
        got = [one["logprob"] for one in found["content"]]
        assert [one["top_logprobs"][0]["logprob"] for one in found["content"]] == got
    else:
        got = found["token_logprobs"]
        assert [top["y"] for top in found["top_logprobs"]] == got
    assert got == [-9999.0, -9999.0, -9999.0, 0.0, 0.0, -0.123457, -9999.0]


def test_a36_the_first_token_of_an_echo_has_none() -> None:
    echo = (entry(1, b"a", None, 0), entry(2, b"b", -1.0, 1, (3, b"c", -0.5)))
    pieces = [Piece("ab", 0, None, 0, echo, 2), end()]
    logprobs = whole(Text, call(logprobs=1), pieces)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -1.0]
    assert logprobs["top_logprobs"] == [None, {"b": -1.0, "c": -0.5}]


def test_a45_separators_in_tokens_are_escaped() -> None:
    text = "\u2028"
    scores = (entry(1, text.encode(), -1.0, 0, (1, text.encode(), -1.0)),)
    pieces = [Piece(text, 1, end().completion, 0, scores, 3)]
    for shape in SHAPES:
        data = streamed(shape, call(logprobs=1), pieces)
        assert all(line.startswith("data: ") for line in data.decode().splitlines() if line)
        events(data)


def test_an_error_event_has_the_error_at_its_top() -> None:
    assert events(error_event('{"error":{"message":"a\u2028b"}}'.encode())) == [
        {"error": {"message": "a\u2028b"}}
    ]
    assert len(error_event("\u2028".encode()).decode().splitlines()) == 2
