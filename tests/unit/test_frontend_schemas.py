"""OpenAI's bodies: what is read, and what is refused by name."""

from typing import Any

import pytest

from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.types import ChatMessage, ChatPrompt, Sampling, TextPrompt, TokenPrompt
from services.frontend.request import Request, caller_id
from services.frontend.rest.fields import parse
from services.frontend.rest.schemas import Arrival, Call, parse_chat, parse_text

ARRIVAL = Arrival(deadline=10.0, traceparent="", caller_id="")
USER = {"role": "user", "content": "hi"}


def chat(**more: Any) -> Call:
    return parse_chat({"model": "m", "messages": [USER], **more}, ARRIVAL, max_messages=10)


def complete(**more: Any) -> Call:
    return parse_text({"model": "m", "prompt": "hi", **more}, ARRIVAL)


def refused(read: Any, **more: Any) -> MeshError:
    with pytest.raises(InvalidRequestError) as caught:
        read(**more)
    return caught.value


def test_everything_that_can_be_said_is_read() -> None:
    call = chat(
        stream=True,
        stream_options={"include_usage": True},
        stop=["a", "b"],
        max_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        seed=2**63 - 1,
        stop_token_ids=[5],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-4,
        user="🙂",
        metadata={"a": "b"},
    )
    assert call.stream
    assert call.include_usage
    assert call.request == Request(
        model="m",
        prompt=ChatPrompt((ChatMessage("user", "hi"),)),
        deadline=10.0,
        sampling=Sampling(
            max_tokens=7,
            min_tokens=2,
            temperature=0.0,
            top_p=0.5,
            top_k=3,
            min_p=0.25,
            presence_penalty=-1.0,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            seed=2**63 - 1,
            stop_token_ids=(5,),
            ignore_eos=True,
        ),
        stop=("a", "b"),
        include_stop=True,
        keep_special=True,
        priority=-4,
        id=call.request.id,
    )


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "seed", "stop", "max_tokens", "stream", "stream_options", "n"]
    )
    nulls |= dict.fromkeys(["tools", "logprobs", "response_format", "logit_bias", "unheard_of"])
    plain, nulled = chat().request, chat(**nulls).request
    assert (plain.sampling, plain.stop) == (nulled.sampling, nulled.stop) == (Sampling(), ())


def test_a11_explicit_zeros_are_zeros() -> None:
    sampling = chat(temperature=0, seed=0, presence_penalty=0, min_p=0).request.sampling
    assert (sampling.temperature, sampling.seed) == (0.0, 0)
    assert (sampling.presence_penalty, sampling.min_p) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [-0.1, 101, "1", True, [1]],
        "top_p": [0, 1.1, "x"],
        "top_k": [0, -2, 1.5, True],
        "min_p": [-1, 2],
        "presence_penalty": [3],
        "frequency_penalty": [-3],
        "repetition_penalty": [0],
        "seed": [-1, 2**63, 2**64, 1.0, "7", True],
        "max_tokens": [0, -1, 1.5, "5", 10**12, True],
        "max_completion_tokens": [0, -1, 1.5],
        "min_tokens": [-1, 1.5],
        "stream": ["False", 1],
        "ignore_eos": [0],
        "priority": [2**31, 0.5],
        "stop_token_ids": [[-1], [2**32], [True], "5", list(range(257))],
        "stop": [[""], "", ["", "x"], [None], 5, ["x"] * 17, "x" * 100_000, {}],
        "n": [0, 2, True, "1"],
        "logprobs": [True],
        "top_logprobs": [5, 2_000_000_000],
        "tools": [[{"type": "function"}], {}],
        "tool_choice": ["auto", {}],
        "response_format": [{"type": "json_object"}, "text"],
        "logit_bias": [{"5": 1}],
        "echo": [True],
        "suffix": ["x"],
        "best_of": [1000],
        "kv_transfer_params": [{"remote_host": "169.254.169.254"}],
        "bootstrap_room": [1],
        "data_parallel_rank": [0],
        "model": ["", 5],
        "messages": ["x", [], {}, [5], [{}], [[]], [USER] * 11],
    }.items(),
)
def test_wrong_values_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(chat, **{field: value})
        assert (error.field or "").startswith(field), (field, value, error)
        assert (
            field in error.message
            or "model" in error.message
            or "message" in error.message
            or (field == "stop" and "stop string" in error.message)
        )


def test_a22_the_newer_length_wins() -> None:
    assert chat(max_tokens=5).request.sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=3).request.sampling.max_tokens == 3
    assert chat(max_tokens=None, max_completion_tokens=3).request.sampling.max_tokens == 3
    assert chat().request.sampling.max_tokens is None
    assert complete().request.sampling.max_tokens == 16
    assert complete(max_tokens=None).request.sampling.max_tokens == 16
    assert complete(max_tokens=1).request.sampling.max_tokens == 1


def test_a30_stream_options() -> None:
    assert not chat(stream=True).include_usage
    for options in ({}, {"include_usage": False}, {"include_usage": None}, None):
        assert not chat(stream=True, stream_options=options).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    for options in ({}, {"include_usage": True}):
        assert refused(chat, stream_options=options).field == "stream_options"
    wrong = refused(chat, stream=True, stream_options={"include_usage": 1})
    assert wrong.field == "stream_options.include_usage"
    wrong = refused(chat, stream=True, stream_options={"continuous_usage_stats": True})
    assert wrong.field == "stream_options.continuous_usage_stats"
    assert refused(chat, stream=True, stream_options=[]).field == "stream_options"


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None, "tool_calls": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "user", "content": None}, ""),
        ({"role": "user", "content": ""}, ""),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "ab",
        ),
        ({"role": "assistant", "content": "x", "refusal": None, "annotations": []}, "x"),
    ],
)
def test_a17_message_shapes_that_are_taken(message: dict[str, Any], content: str) -> None:
    prompt = chat(messages=[message]).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content == content


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_a17_message_shapes_that_are_refused(message: dict[str, Any], field: str) -> None:
    assert refused(chat, messages=[message]).field == field


def test_developers_are_the_system() -> None:
    prompt = chat(messages=[{"role": "developer", "content": "x"}]).request.prompt
    assert prompt == ChatPrompt((ChatMessage("system", "x"),))


def test_prompts_of_completions() -> None:
    assert complete(prompt="a").request.prompt == TextPrompt("a")
    assert complete(prompt=["a"]).request.prompt == TextPrompt("a")
    assert complete(prompt=[1, 2]).request.prompt == TokenPrompt((1, 2))
    assert complete(prompt=[[1, 2]]).request.prompt == TokenPrompt((1, 2))


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [""], [], [[]], None, 5, {}),
        *(["a", "b"], [[1], [2]], ["hi", ""], [1, "a"], [1.5], [True]),
        *([-1], [2**32], [2**40], [[1, -1]], ["x"] * 100_000),
    ],
)
def test_prompts_that_are_refused(prompt: Any) -> None:
    assert refused(complete, prompt=prompt).field == "prompt"


def test_fields_of_the_other_route_are_unknown() -> None:
    assert refused(chat, prompt="x").field == "prompt"
    assert refused(complete, messages=[USER]).field == "messages"
    assert refused(complete, max_completion_tokens=5).field == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nope",
        b"[]",
        b'"x"',
        b"null",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud83d"}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b"\x1f\x8b\x08\x00",
        b'{"a": 1} x',
    ],
)
def test_a02_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="body"):
        parse(body)


def test_a_wrong_body_is_not_quoted() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(b'{"secret": secret}')
    assert "secret" not in caught.value.message


def test_a08_ids_of_callers() -> None:
    assert caller_id("abc-1") == "abc-1"
    for bad in ("", "a b", "a\tb", "a\n", "зapros", "a" * 129, "\x7f"):
        assert caller_id(bad) == ""
    assert chat().request.id != chat().request.id
