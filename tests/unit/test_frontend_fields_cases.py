"""What callers send that would harm: refused at once, with the field and the bad value."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidRequestError, MeshError
from services.frontend.config import LimitsConfig
from services.frontend.request import check_limits
from services.frontend.rest.body import parse
from services.frontend.rest.request_fields import CHAT, DETOKENIZE, TEXT, TOKENIZE_CHAT
from services.frontend.rest.schemas import (
    Arrival,
    Call,
    parse_chat,
    parse_detokenize,
    parse_text,
    parse_tokenize,
)

ARRIVAL = Arrival(deadline=10.0, traceparent="", caller_id="")
LIMITS = LimitsConfig()
USER = {"role": "user", "content": "hi"}


def read(reader: Any, document: Any) -> Call:
    call: Call = reader(parse(json.dumps({"model": "m", **document}).encode()), ARRIVAL, LIMITS)
    check_limits(call.request, LIMITS)
    return call


def chat(**more: Any) -> Call:
    return read(parse_chat, {"messages": [USER], **more})


def complete(**more: Any) -> Call:
    return read(parse_text, {"prompt": "hi", **more})


def tokenize(**more: Any) -> Call:
    return read(parse_tokenize, {"prompt": "hi", **more})


def detokenize(**more: Any) -> Call:
    return read(parse_detokenize, {"tokens": [1], **more})


def refused(reader: Any, **more: Any) -> MeshError:
    with pytest.raises(InvalidRequestError) as caught:
        reader(**more)
    return caught.value


@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_room", "data_parallel_rank"])
@pytest.mark.parametrize("reader", [chat, complete, tokenize, detokenize])
def test_a37_fields_of_the_hand_off_are_not_for_callers(reader: Any, name: str) -> None:
    for value in ({"remote_host": "169.254.169.254"}, {}, 0, 1, "x"):
        assert refused(reader, **{name: value}).field == name


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({"-1": 1}, "-1"),
        ({"a": 1}, "'a'"),
        ({"": 1}, "''"),
        ({"5.0": 1}, "'5.0'"),
        ({"٣": 1}, "'٣'"),
        ({"4294967296": 1}, "4294967296"),
        ({"9" * 5000: 1}, "'999"),
        ({"5": 101}, "for 5"),
        ({"5": -100.5}, "for 5"),
        ({"5": "1"}, "numbers"),
        ({"5": True}, "numbers"),
        ({"5": None}, "numbers"),
        ({"5": 1, "05": 2}, "twice"),
        ({str(i): 1 for i in range(5000)}, "1024"),
        ([], "an object"),
    ],
)
def test_a44_biases_that_are_refused(bias: Any, words: str) -> None:
    error = refused(complete, logit_bias=bias)
    assert error.field == "logit_bias"
    assert words in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "prompt"])
def test_a44_the_bad_id_is_named(field: str) -> None:
    for bad in (-1, 2**32, 2**40):
        error = refused(complete, **{field: [1, bad]})
        assert (error.field, str(bad) in error.message) == (field, True)
    error = refused(detokenize, tokens=[1, 2**40])
    assert (error.field, str(2**40) in error.message) == ("tokens", True)


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**32, 2**63 - 1, -(2**63)])
def test_a49_seeds_of_64_bits(seed: int) -> None:
    assert chat(seed=seed).request.sampling.seed == seed


@pytest.mark.parametrize("stop", [None, []])
def test_a56_no_stop(stop: Any) -> None:
    assert chat(stop=stop).request.stop == ()


@pytest.mark.parametrize("stop", ["\0", "a", ["a"] * 16, ["\n\n"]])
def test_a56_stops(stop: Any) -> None:
    assert chat(stop=stop).request.stop == tuple([stop] if isinstance(stop, str) else stop)


@pytest.mark.parametrize(
    "stop", [[""], "", ["", "x"], [None], [5], 5, True, ["x"] * 17, "x" * 100_000, {}, [["a"]]]
)
def test_a56_odd_stops_are_refused(stop: Any) -> None:
    assert refused(chat, stop=stop).field == "stop"


@pytest.mark.parametrize(
    ("reader", "more"),
    [
        (chat, {"logprobs": True, "top_logprobs": 2_000_000_000}),
        (chat, {"logprobs": True, "top_logprobs": 16384}),
        (chat, {"n": 5_000_000}),
        (complete, {"n": 5_000_000}),
        (complete, {"n": 2**40, "prompt": ["a", "b"]}),
        (complete, {"best_of": 1000}),
        (complete, {"prompt_logprobs": -1}),
        (complete, {"stop": ["x"] * 500_000}),
        (complete, {"prompt": ["x"] * 100_000}),
        (complete, {"prompt": [[1]] * 100_000}),
        (complete, {"max_tokens": 10**12}),
        (complete, {"truncate_prompt_tokens": 10**12}),
        (complete, {"logit_bias": {str(i): 1 for i in range(100_000)}}),
        (chat, {"messages": [USER] * 100_000}),
        (chat, {"tools": [{}] * 100_000}),
        (chat, {"metadata": {str(i): "x" for i in range(100_000)}}),
    ],
)
def test_a58_much_for_little_is_refused_at_once(reader: Any, more: dict[str, Any]) -> None:
    began = time.thread_time()
    refused(reader, **more)
    # Of CPU time, with a body that is made and parsed here as well, and perhaps garbage of others.
    assert time.thread_time() - began < 3


NAMES = sorted({field.name for field in (*CHAT, *TEXT, *DETOKENIZE, *TOKENIZE_CHAT)})
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    LEAVES | st.integers(-2, 3) | st.sampled_from(["none", "text", "user", "1", USER]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "tool_calls", "1", "include_usage"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(
    st.sampled_from([chat, complete, tokenize, detokenize]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
)
def test_a02_any_body_is_read_or_refused(reader: Any, body: dict[str, Any]) -> None:
    try:
        reader(**body)
    except InvalidRequestError as error:
        assert error.message  # noqa: PT017 - either is right
