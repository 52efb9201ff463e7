"""OpenAI's bodies: what is read, and what is refused by name."""

import json
from typing import Any

import pytest

from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.types import ChatMessage, ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from services.frontend.config import LimitsConfig
from services.frontend.request import Request, caller_id, check_limits
from services.frontend.rest.body import parse
from services.frontend.rest.request_fields import CHAT, TEXT
from services.frontend.rest.schemas import (
    Arrival,
    Call,
    parse_chat,
    parse_detokenize,
    parse_text,
    parse_tokenize,
)

ARRIVAL = Arrival(deadline=10.0, traceparent="", caller_id="")
LIMITS = LimitsConfig(messages=10)
USER = {"role": "user", "content": "hi"}


def read(reader: Any, document: Any) -> Call:
    call: Call = reader(parse(json.dumps(document).encode()), ARRIVAL, LIMITS)
    check_limits(call.request, LIMITS)
    return call


def chat(**more: Any) -> Call:
    return read(parse_chat, {"model": "m", "messages": [USER], **more})


def complete(**more: Any) -> Call:
    return read(parse_text, {"model": "m", "prompt": "hi", **more})


def tokenize(**more: Any) -> Call:
    return read(parse_tokenize, {"model": "m", **more})


def detokenize(**more: Any) -> Call:
    return read(parse_detokenize, {"model": "m", **more})


def refused(reader: Any, **more: Any) -> MeshError:
    with pytest.raises(InvalidRequestError) as caught:
        reader(**more)
    return caught.value


def prompt_of(call: Call) -> Prompt:
    (prompt,) = call.request.prompts
    return prompt


SAMPLING: dict[str, Any] = {
    "stop": ["a", "b"],
    "bad_words": ["c", " d"],
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "presence_penalty": -1,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "seed": 2**63 - 1,
    "stop_token_ids": [5],
    "allowed_token_ids": [5, 6],
    "logit_bias": {"5": 1, "6": -2.5},
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": 9,
    "n": 2,
    "best_of": 2,
    "use_beam_search": False,
    "length_penalty": 1,
    "priority": -4,
    "request_id": "mine-1",
    "return_tokens_as_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "user": "🙂",
    "metadata": {"a": "b"},
}


@pytest.mark.parametrize("reader", [chat, complete])
def test_everything_that_can_be_said_is_read(reader: Any) -> None:
    given = SAMPLING | {"logprobs": True, "top_logprobs": 4} if reader is chat else SAMPLING
    given = given if reader is chat else given | {"logprobs": 4}
    call = reader(**given)
    prompt = ChatPrompt((ChatMessage("user", "hi"),)) if reader is chat else TextPrompt("hi")
    assert call == Call(
        Request(
            model="m",
            prompts=(prompt,),
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
                allowed_token_ids=(5, 6),
                logit_bias=((5, 1.0), (6, -2.5)),
                logprobs=4,
                ignore_eos=True,
            ),
            n=2,
            truncate_to=9,
            stop=("a", "b"),
            bad_words=("c", " d"),
            include_stop=True,
            keep_special=True,
            priority=-4,
            caller_id="mine-1",
            id=call.request.id,
        ),
        stream=True,
        include_usage=True,
        continuous_usage=True,
        tokens_as_ids=True,
    )


@pytest.mark.parametrize(("reader", "fields"), [(chat, CHAT), (complete, TEXT)])
def test_null_is_absent(reader: Any, fields: Any) -> None:
    nulls: dict[str, Any] = {field.name: None for field in fields if not field.required}
    plain, nulled = reader().request, reader(**nulls, unheard_of=None).request
    assert (plain.sampling, plain.stop, plain.n) == (nulled.sampling, nulled.stop, nulled.n)
    assert plain.prompts == nulled.prompts


def test_a11_explicit_zeros_are_zeros() -> None:
    zeros = {"temperature": 0, "seed": 0, "presence_penalty": 0, "min_p": 0, "logprobs": 0}
    sampling = complete(**zeros).request.sampling
    assert (sampling.temperature, sampling.seed, sampling.logprobs) == (0.0, 0, 0)
    assert (sampling.presence_penalty, sampling.min_p) == (0.0, 0.0)
    assert complete(min_tokens=0, priority=0).request.sampling.min_tokens == 0


@pytest.mark.parametrize(("given", "means"), [(0, -1), (-1, -1), (1, 1), (None, None)])
def test_no_likeliest_tokens_are_all(given: int | None, means: int | None) -> None:
    assert complete(top_k=given).request.sampling.top_k == means


def test_a11_absent_is_absent() -> None:
    assert chat().request.sampling == Sampling()
    assert complete().request.sampling == Sampling(max_tokens=16)


BOTH: dict[str, list[Any]] = {
    "temperature": [-0.1, 101, "1", True, [1]],
    "top_p": [0, 1.1, "x"],
    "top_k": [-2, 1.5, True, 2**31],
    "min_p": [-1, 2],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "seed": [-(2**63) - 1, 2**63, 2**64, 1.0, "7", True],
    "max_tokens": [-1, 1.5, "5", 10**12, True],
    "min_tokens": [-1, 1.5],
    "stream": ["False", 1],
    "ignore_eos": [0],
    "priority": [2**31, 0.5],
    "stop_token_ids": [[-1], [2**32], [True], "5", list(range(257))],
    "allowed_token_ids": [[], [-1], [2**40], [1.0], list(range(2000))],
    "n": [0, -1, 2.0, True, "1", 129],
    "best_of": [2, 1000, -1],
    "use_beam_search": [True, 0],
    "length_penalty": [1.1, 0],
    "spaces_between_special_tokens": [False],
    "truncate_prompt_tokens": [0, -2, 2**32, "1"],
    "stream_options": [{"include_usage": True}, {}],
    "request_id": ["", "a b", "зapros", "a" * 129, 5],
    "metadata": [{"a": 1}, "x", {str(i): "x" for i in range(17)}],
    "user": [5],
    "store": [True],
    "service_tier": ["flex"],
    "response_format": [{"type": "json_object"}, "text"],
    "suffix": ["x"],
    "model": ["", 5, None],
    "echo": [1],
    "guided_json": [{}],
    "prompt_logprobs": [-1, 21, 2_000_000_000, True, 1.0, "1"],
    "bad_words": [[""], ["x", ""], "x", [5], {}, ["x"] * 129, ["x" * 257]],
    "parallel": [1],
}


@pytest.mark.parametrize("reader", [chat, complete])
@pytest.mark.parametrize(("field", "values"), BOTH.items())
def test_wrong_values_are_refused_by_name(reader: Any, field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(reader, **{field: value})
        assert (error.field or "").startswith(field), (field, value, error)
        assert field in error.message or "model" in error.message or field == "priority"


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "max_tokens": [0],
        "max_completion_tokens": [0, -1, 1.5, 10**12],
        "logprobs": [1, "x"],
        "top_logprobs": [5, -1, 2.0, True],
        "tools": [[{"type": "function"}], {}, [5]],
        "tool_choice": ["auto", {}, "required"],
        "functions": [[{}]],
        "echo": [1],
        "messages": ["x", [], {}, [5], [{}], [[]], [USER] * 11, None],
        "chat_template": [5],
        "chat_template_kwargs": [[], "x"],
        "continue_final_message": [1],
        "modalities": [["audio"]],
    }.items(),
)
def test_wrong_values_of_chats_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(chat, **{field: value})
        assert (error.field or "").startswith(field), (field, value, error)


@pytest.mark.parametrize("reader", [chat, complete])
def test_a_prompts_log_probabilities_are_not_streamed(reader: Any) -> None:
    assert reader(prompt_logprobs=0).request.sampling.prompt_logprobs == 0
    assert reader(prompt_logprobs=20, stream=False).request.sampling.prompt_logprobs == 20
    assert reader(stream=True).request.sampling.prompt_logprobs is None
    for count in (0, 1):
        assert refused(reader, prompt_logprobs=count, stream=True).field == "prompt_logprobs"


@pytest.mark.parametrize("reader", [chat, complete])
def test_bad_words_are_taken_as_they_are(reader: Any) -> None:
    words = [" the", "\0", "é" * 256, *"abc"]
    assert reader(bad_words=words).request.bad_words == tuple(words)
    assert reader(bad_words=[]).request.bad_words == ()
    assert reader(bad_words=None).request.bad_words == ()
    assert len(reader(bad_words=["x"] * 128).request.bad_words) == 128


def test_a22_the_newer_length_wins() -> None:
    assert chat(max_tokens=5).request.sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=3).request.sampling.max_tokens == 3
    assert chat(max_tokens=None, max_completion_tokens=3).request.sampling.max_tokens == 3
    assert chat().request.sampling.max_tokens is None
    assert refused(chat, max_tokens=5, max_completion_tokens=0).field == "max_completion_tokens"
    assert complete().request.sampling.max_tokens == 16
    assert complete(max_tokens=None).request.sampling.max_tokens == 16
    assert complete(min_tokens=20).request.sampling.max_tokens == 20
    assert complete(max_tokens=1).request.sampling.max_tokens == 1


def test_a22_nothing_is_generated_only_with_an_echo() -> None:
    call = complete(max_tokens=0, echo=True, logprobs=2)
    assert (call.request.generate, call.request.echo) == (False, True)
    assert call.request.sampling.logprobs == 2
    assert complete(max_tokens=1, echo=True).request.generate
    assert refused(complete, max_tokens=0).field == "max_tokens"
    assert refused(complete, max_tokens=0, echo=False).field == "max_tokens"


def test_a30_stream_options() -> None:
    assert not chat(stream=True).include_usage
    for options in ({}, {"include_usage": False}, {"include_usage": None}, None):
        assert not chat(stream=True, stream_options=options).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    alone = chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert not alone.include_usage
    assert not alone.continuous_usage
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).continuous_usage
    for options in ({}, {"include_usage": True}):
        assert refused(chat, stream_options=options).field == "stream_options"
        assert refused(chat, stream=False, stream_options=options).field == "stream_options"
    wrong = refused(chat, stream=True, stream_options={"include_usage": 1})
    assert wrong.field == "stream_options.include_usage"
    wrong = refused(chat, stream=True, stream_options={"other": True})
    assert wrong.field == "stream_options.other"
    assert refused(chat, stream=True, stream_options=[]).field == "stream_options"


def test_a36_log_probabilities_of_chats() -> None:
    assert chat().request.sampling.logprobs is None
    assert chat(logprobs=False).request.sampling.logprobs is None
    assert chat(logprobs=True).request.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=0).request.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).request.sampling.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).request.sampling.logprobs is None
    for more in ({}, {"logprobs": False}, {"logprobs": None}):
        assert refused(chat, top_logprobs=2, **more).field == "top_logprobs"
    error = refused(chat, logprobs=True, top_logprobs=21)
    assert (error.field, error.message[:12]) == ("top_logprobs", "top_logprobs")
    assert refused(complete, logprobs=21).field == "logprobs"
    assert refused(complete, logprobs=True).field == "logprobs"
    assert refused(complete, top_logprobs=2).field == "top_logprobs"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (TextPrompt("a"),)),
        (["a"], (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([[1, 2]], (TokenPrompt((1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt((1,)), TokenPrompt((2, 3)))),
    ],
)
def test_prompts_of_completions(prompt: Any, prompts: Any) -> None:
    request = complete(prompt=prompt, n=3).request
    assert request.prompts == prompts
    assert request.choices == 3 * len(prompts)


def test_special_tokens_are_the_callers_choice() -> None:
    assert prompt_of(complete(add_special_tokens=False)) == TextPrompt("hi", False)
    with_them = prompt_of(chat(add_special_tokens=True))
    assert isinstance(with_them, ChatPrompt)
    assert with_them.add_special_tokens


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [""], [], [[]], None, 5, {}, True),
        *(["hi", ""], [1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [[1], 2], [1.5], [True]),
        *([-1], [2**32], [2**40], [[1, -1]], [[1], []], [["a"]], [None], [{}], ["a", None]),
    ],
)
def test_prompts_that_are_refused(prompt: Any) -> None:
    assert refused(complete, prompt=prompt).field == "prompt"


def test_fields_of_the_other_route_are_unknown() -> None:
    assert refused(chat, prompt="x").field == "prompt"
    assert refused(complete, messages=[USER]).field == "messages"
    assert refused(complete, max_completion_tokens=5).field == "max_completion_tokens"
    assert refused(complete, chat_template="x").field == "chat_template"


def test_tokenizing() -> None:
    assert prompt_of(tokenize(prompt="x")) == TextPrompt("x")
    assert prompt_of(tokenize(prompt="x", add_special_tokens=False)) == TextPrompt("x", False)
    asked = tokenize(messages=[USER], add_generation_prompt=False, tools=[{"a": 1}])
    assert prompt_of(asked) == ChatPrompt(
        (ChatMessage("user", "hi"),), add_generation_prompt=False, tools='[{"a": 1}]'
    )
    for more in ({}, {"prompt": ""}, {"prompt": [1]}, {"prompt": 5}):
        assert refused(tokenize, **more).field == "prompt"
    assert refused(tokenize, prompt="x", messages=[USER]).field == "prompt"
    assert refused(tokenize, prompt="x", return_token_strs=True).field == "return_token_strs"
    assert refused(tokenize, prompt="x", temperature=1).field == "temperature"


def test_detokenizing() -> None:
    call = detokenize(tokens=[5, 6])
    assert prompt_of(call) == TokenPrompt((5, 6))
    assert call.request.keep_special
    for tokens in (None, [], "x", [1.5], [True], ["a"]):
        assert refused(detokenize, tokens=tokens).field == "tokens"


def test_a08_ids_of_callers() -> None:
    assert caller_id("abc-1") == "abc-1"
    for bad in ("", "a b", "a\tb", "a\n", "зapros", "a" * 129, "\x7f"):
        assert caller_id(bad) == ""
    assert chat().request.id != chat().request.id
    assert chat(request_id="mine").request.caller_id == "mine"
    header = Arrival(10.0, "", "header")
    body = parse(b'{"model":"m","prompt":"x","request_id":"body"}')
    assert parse_text(body, header, LIMITS).request.caller_id == "header"
