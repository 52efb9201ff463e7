"""The parts of the comparison with another server: asking, reading, comparing, judging."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.testing.differential.answers import Answer, Choice, Position, Ranked, fetch
from kvmesh.testing.differential.asks import CHAT, COMPLETIONS, PROBED, Ask, Said
from kvmesh.testing.differential.compare import Difference, Known, differences, judge
from kvmesh.testing.differential.good_asks import good_asks
from kvmesh.testing.differential.known import KNOWN
from kvmesh.testing.differential.other_asks import bad_asks, other_asks

HEAD = {"id": "cmpl-1", "object": "text_completion", "model": "m"}
ASK = Ask("group/one", COMPLETIONS, {})
SAID = {prompt: Said("abcdefgh ijklmnop qrstuvw", tuple(range(24))) for prompt in PROBED}


async def answered(body: bytes, ask: Ask = ASK, status: int = 200, kind: str = "json") -> Answer:
    types = {"json": "application/json", "events": "text/event-stream; charset=utf-8"}

    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"content-type": types[kind]}, content=body)

    transport = httpx.MockTransport(respond)
    async with httpx.AsyncClient(base_url="http://test", transport=transport) as client:
        return await fetch(client, ask)


def whats(ours: Answer, theirs: Answer) -> list[str]:
    return [difference.what for difference in differences(ASK, ours, theirs)]


def answer(**choice: Any) -> Answer:
    return Answer(200, choices={0: Choice("text", "stop", **choice)}, usage=(1, 2, 3))


def test_the_same_seed_makes_the_same_requests_and_all_have_names_of_their_own() -> None:
    asks = good_asks("m", SAID, random.Random(1))
    assert asks == good_asks("m", SAID, random.Random(1))
    assert asks != good_asks("m", SAID, random.Random(2))
    every = [*asks, *bad_asks("m"), *other_asks("m")]
    assert len(asks) > 150
    assert len({ask.name for ask in every}) == len(every) > 200


async def test_a_whole_answer_is_read() -> None:
    choice = {"index": 1, "text": "hi", "finish_reason": "stop", "stop_reason": "x"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    got = await answered(json.dumps({**HEAD, "choices": [choice], "usage": usage}).encode())
    assert got.choices == {1: Choice("hi", "stop", "x")}
    assert got.usage == (3, 1, 4)
    assert got.labels == {"cmpl", "text_completion", "m"}
    assert got.done


async def test_a_streamed_answer_is_put_together_choice_by_choice() -> None:
    def event(index: int, text: str, finish: str | None = None) -> bytes:
        delta = {"role": "assistant", "content": text}
        choice = {"index": index, "delta": delta, "finish_reason": finish}
        return b"data: " + json.dumps({**HEAD, "choices": [choice]}).encode() + b"\n\n"

    events = [event(0, "a"), event(1, "b"), event(0, "c", "stop"), event(1, "", "length")]
    got = await answered(b"".join(events) + b"data: [DONE]\n\n", Ask("x", CHAT, {}), kind="events")
    assert got.choices == {0: Choice("ac", "stop"), 1: Choice("b", "length")}
    assert got.done
    assert "assistant" in got.labels
    assert got.usage is None
    cut = await answered(events[0], kind="events")
    assert not cut.done


async def test_usage_that_comes_with_text_is_told_from_usage_that_comes_after() -> None:
    choice = {"index": 0, "text": "a", "finish_reason": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}

    async def read(*chunks: dict[str, Any]) -> Answer:
        events = [b"data: " + json.dumps(HEAD | chunk).encode() + b"\n\n" for chunk in chunks]
        return await answered(b"".join(events), kind="events")

    after = await read({"choices": [choice]}, {"choices": [], "usage": usage})
    both = await read({"choices": [choice], "usage": usage})
    assert (after.usage, after.usage_with_text) == ((3, 1, 4), False)
    assert (both.usage, both.usage_with_text) == ((3, 1, 4), True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"type": "BadRequestError", "code": 400}, "bad request"),
        ({"type": "Bad Request", "code": 400}, "bad request"),
        ({"type": "invalid_request_error", "code": "invalid_argument"}, "bad request"),
        ({"type": "invalid_request_error", "code": "model_not_found"}, "not found"),
        ({"type": "NotFoundError", "code": 404}, "not found"),
        ({"type": "server_error", "code": "internal"}, "server error"),
        ({"type": "of its own", "code": 418}, "of its own"),
    ],
)
async def test_errors_of_both_servers_have_one_class(error: dict[str, Any], expected: str) -> None:
    got = await answered(json.dumps({"error": error}).encode(), status=400)
    assert got.error == expected


async def test_an_error_that_is_no_error_object_is_told() -> None:
    assert (await answered(b'{"detail": "Not Found"}', status=404)).error == "no error object"
    assert (await answered(b"<html>", status=404)).error == "no error object"


async def test_an_error_in_a_stream_is_read() -> None:
    error = {"error": {"type": "server_error", "code": "internal"}}
    got = await answered(b"data: " + json.dumps(error).encode() + b"\n\n", kind="events")
    assert got.error == "server error"
    assert not got.done


async def test_log_probabilities_of_both_routes_are_read_into_one_form() -> None:
    columns = {
        "tokens": [" a", "b"],
        "token_logprobs": [None, -1.5],
        "top_logprobs": [None, {"b": -1.5, "c": -2.0}],
        "text_offset": [0, 2],
    }
    choice = {"index": 0, "text": " ab", "finish_reason": "stop", "logprobs": columns}
    got = await answered(json.dumps({**HEAD, "choices": [choice]}).encode())
    assert got.choices[0].logprobs == [
        Position(" a", None, {}, 0),
        Position("b", -1.5, {"b": -1.5, "c": -2.0}, 2),
    ]
    entry = {"token": "b", "logprob": -1.5, "bytes": [98], "top_logprobs": []}
    message = {"index": 0, "message": {"content": "b"}, "logprobs": {"content": [entry]}}
    got = await answered(json.dumps({**HEAD, "choices": [message]}).encode(), Ask("x", CHAT, {}))
    assert got.choices[0].logprobs == [Position("b", -1.5, {}, utf8=[98])]


def test_equal_answers_have_no_difference() -> None:
    assert whats(answer(), answer()) == []


def test_another_status_is_the_only_difference() -> None:
    assert whats(Answer(400, error="bad request"), answer()) == ["status 400|200"]


def test_each_kind_of_difference_is_found() -> None:
    other = Answer(200, choices={0: Choice("texts", "length", "x")}, usage=(1, 2, 4), done=False)
    assert whats(answer(), other) == ["done", "usage", "text", "finish_reason", "stop_reason"]
    assert whats(Answer(400, error="bad request"), Answer(400, error="not found")) == ["error"]
    assert whats(answer(), Answer(200, usage=(1, 2, 3))) == ["choices"]
    assert whats(Answer(200, labels={"a"}), Answer(200, labels={"b"})) == ["labels"]


def test_log_probabilities_may_differ_by_little() -> None:
    def one(logprob: float, **top: float) -> Answer:
        return answer(logprobs=[Position("a", logprob, top)])

    assert whats(one(-1.0, a=-1.0, b=-2.0), one(-1.009, a=-1.009, b=-2.0)) == []
    assert whats(one(-1.0), one(-1.02)) == ["logprobs"]
    assert whats(one(-1.0), answer()) == ["logprobs"]
    assert whats(answer(logprobs=[]), one(-1.0)) == ["logprobs"]
    # Two that are as likely as each other: either may be the last of the likeliest.
    assert whats(one(-1.0, a=-1.0, b=-2.0), one(-1.0, a=-1.0, c=-2.004)) == []
    assert whats(one(-1.0, a=-1.0, b=-2.0), one(-1.0, a=-1.0, c=-1.5)) == ["logprobs"]
    assert whats(one(-1.0, a=-1.0), one(-1.0, a=-1.0, b=-2.0)) == ["logprobs"]


def test_offsets_and_bytes_of_tokens_are_compared() -> None:
    def one(offset: int, utf8: list[int]) -> Answer:
        return answer(logprobs=[Position("a", -1.0, {}, offset, utf8)])

    assert whats(one(0, [97]), one(3, [98])) == ["offsets", "bytes"]


async def test_what_is_told_of_a_prompt_is_read_from_either_place() -> None:
    row = {"7": {"logprob": -1.5, "rank": 3, "decoded_token": "x"}}
    told = [None, {"7": Ranked(-1.5, 3, "x")}]
    choice = {"index": 0, "text": "a", "finish_reason": "stop"}
    inside = {**HEAD, "choices": [{**choice, "prompt_logprobs": [None, row]}]}
    got = await answered(json.dumps(inside).encode())
    assert (got.prompt, got.choices[0].prompt) == (None, told)
    beside = {**HEAD, "choices": [choice], "prompt_logprobs": [None, row]}
    got = await answered(json.dumps(beside).encode())
    assert (got.prompt, got.choices[0].prompt) == (told, None)


def test_what_is_told_of_a_prompt_is_compared() -> None:
    def one(*rows: dict[str, Ranked] | None) -> Answer:
        return answer(prompt=[*rows])

    def row(own: int, logprob: float = -9.0, text: str = "x") -> dict[str, Ranked]:
        return {"7": Ranked(logprob, own, text), "3": Ranked(-1.0, 1, "y")}

    assert whats(one(None, row(50)), one(None, row(50))) == []
    assert whats(one(None, row(50)), one(None, row(52, -9.005))) == []
    assert whats(one(None, row(50)), one(None, row(50, -9.2))) == ["prompt"]
    assert whats(one(None, row(50)), one(None, row(60))) == ["prompt"]
    assert whats(one(None, row(50)), one(None, row(50, text="z"))) == ["prompt_text"]
    assert whats(one(None, row(50)), one(row(50), row(50))) == ["prompt"]
    assert whats(one(None, row(50)), one(None)) == ["prompt"]
    assert whats(one(None), answer()) == ["prompt"]
    assert whats(answer(), one(None)) == ["prompt"]
    other = {"3": Ranked(-1.0, 1, "y"), "7": Ranked(-9.0, 50, "x")}
    assert whats(one(row(50)), one(other)) == ["prompt"]
    # Two that are as likely as each other: either may be the last of the likeliest.
    last = {"7": Ranked(-0.5, 1, "x"), "4": Ranked(-1.001, 2, "y")}
    first = {"7": Ranked(-0.5, 1, "x"), "5": Ranked(-1.0, 2, "z")}
    assert whats(one(first), one(last)) == []
    assert whats(Answer(200, prompt=[None]), Answer(200)) == ["prompt"]


def test_a_difference_goes_to_the_first_entry_that_covers_it() -> None:
    narrow = Known("narrow", ("group/one",), ("text",))
    wide = Known("wide", ("group/*",), ("*",))
    text, usage = (Difference(ASK, what, 1, 2) for what in ("text", "usage"))
    verdict = judge([text, usage], [narrow, wide])
    assert verdict.explained == {narrow: [text], wide: [usage]}
    assert verdict.unexplained == []
    assert verdict.unused == []


def test_what_no_entry_covers_is_unexplained() -> None:
    difference = Difference(ASK, "status 400|200", 1, 2)
    verdict = judge([difference], [Known("other", ("group/one",), ("status 404|200",))])
    assert verdict.unexplained == [difference]
    assert verdict.unused == ["other: group/one", "other: status 404|200"]


def test_each_part_of_an_entry_must_be_of_use() -> None:
    known = Known("some", ("group/one", "group/two"), ("text", "usage"))
    verdict = judge([Difference(ASK, "text", 1, 2)], [known])
    assert verdict.unused == ["some: group/two", "some: usage"]


def test_an_entry_may_say_how_the_answers_differ() -> None:
    known = Known("longer", ("*",), ("text",), lambda ours, theirs: ours.startswith(theirs))
    more, other = Difference(ASK, "text", "ab", "a"), Difference(ASK, "text", "b", "a")
    verdict = judge([more, other], [known])
    assert verdict.explained == {known: [more]}
    assert verdict.unexplained == [other]


def test_users_can_read_why_of_each_known_difference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
    headings = [line.removeprefix("### ") for line in page.splitlines() if line[:4] == "### "]
    assert len(set(headings)) == len(headings)
    assert set(headings) == {known.title for known in KNOWN}
