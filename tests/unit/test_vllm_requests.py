"""How requests go to vLLM and answers come back."""

import math
from types import SimpleNamespace

import pytest

from kvmesh.engine.base import EngineRequest, Finish
from kvmesh.engine.vllm.requests import (
    check_request,
    completion_limit,
    finish_of,
    logprobs_of,
    sampling_arguments,
)
from kvmesh.errors import ContextLengthError, EngineError, InvalidRequestError
from kvmesh.types import LOGPROB_FLOOR, FinishReason, Sampling, TokenLogprob

EOS = frozenset({2})


def ask(token_ids: list[int], **sampling: object) -> EngineRequest:
    return EngineRequest("r", token_ids, Sampling(**sampling))  # type: ignore[arg-type]


def test_a_request_that_fits_exactly_is_accepted() -> None:
    check_request(ask([0, 9], max_tokens=8), context_length=10, vocab_size=10)
    check_request(ask([1] * 9), context_length=10, vocab_size=10)


@pytest.mark.parametrize("token_ids", [[], [-1], [3, 10]])
def test_bad_prompts_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(ask(token_ids, max_tokens=1), context_length=10, vocab_size=10)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", (9, 10)), ("logit_bias", ((9, 1.0), (10, 1.0)))]
)
def test_a44_ids_outside_of_the_vocabulary_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="10") as caught:
        check_request(ask([1], max_tokens=1, **{field: value}), context_length=10, vocab_size=10)
    assert caught.value.field == field
    check_request(ask([1], max_tokens=1, **{field: value}), context_length=10, vocab_size=11)


@pytest.mark.parametrize(
    ("length", "max_tokens", "field"),
    [(10, None, "prompt"), (11, 1, "prompt"), (5, 6, "max_tokens")],
)
def test_what_does_not_fit_the_context_is_refused(
    length: int, max_tokens: int | None, field: str
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        check_request(ask([1] * length, max_tokens=max_tokens), context_length=10, vocab_size=10)
    assert caught.value.field == field


def test_the_completion_is_as_long_as_asked_or_as_fits() -> None:
    assert completion_limit(ask([1] * 4, max_tokens=3), 10) == 3
    assert completion_limit(ask([1] * 4), 10) == 6


def test_zero_is_zero_and_unset_is_the_models_default() -> None:
    sampling = Sampling(temperature=0.0, top_k=None, presence_penalty=0.0)
    defaults = {"temperature": 0.7, "top_k": 40, "presence_penalty": 1.0, "max_tokens": 5}
    arguments = sampling_arguments(sampling, defaults, EOS, 9)
    assert (arguments["temperature"], arguments["top_k"]) == (0.0, 40)
    assert arguments["presence_penalty"] == 0.0
    assert "top_p" not in arguments
    assert arguments["max_tokens"] == 9


def test_ends_of_sequence_are_stop_tokens_unless_ignored() -> None:
    sampling = Sampling(stop_token_ids=(7,))
    assert sampling_arguments(sampling, {}, EOS, 9)["stop_token_ids"] == [2, 7]
    ignoring = Sampling(stop_token_ids=(7,), ignore_eos=True)
    assert sampling_arguments(ignoring, {}, EOS, 9)["stop_token_ids"] == [7]


def test_min_tokens_never_exceeds_the_limit_of_a_prefill() -> None:
    assert sampling_arguments(Sampling(min_tokens=5), {}, EOS, 1)["min_tokens"] == 1
    assert sampling_arguments(Sampling(min_tokens=5), {}, EOS, 9)["min_tokens"] == 5


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("stop", 7, Finish(FinishReason.STOP, 3, 7)),
        ("stop", None, Finish(FinishReason.STOP, 3)),
        ("length", None, Finish(FinishReason.LENGTH, 3)),
    ],
)
def test_ends(finish_reason: str, stop_reason: int | None, expected: Finish) -> None:
    completion = SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)
    assert finish_of(completion, 3) == expected


@pytest.mark.parametrize("finish_reason", ["abort", "error", "something-new"])
def test_failures_are_errors(finish_reason: str) -> None:
    completion = SimpleNamespace(finish_reason=finish_reason, stop_reason=None)
    with pytest.raises(EngineError, match=finish_reason):
        finish_of(completion, 0)


def test_biases_and_logprobs_go_to_vllm_as_it_wants_them() -> None:
    arguments = sampling_arguments(Sampling(logit_bias=((5, 1.5),), logprobs=0), {}, EOS, 9)
    assert (arguments["logit_bias"], arguments["logprobs"]) == ({5: 1.5}, 0)
    neutral = sampling_arguments(Sampling(), {}, EOS, 9)
    assert (neutral["logit_bias"], neutral["logprobs"]) == (None, None)


def entry(logprob: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_logprobs_are_the_sampled_tokens_and_the_likeliest_in_order() -> None:
    inside = {7: entry(-1.5, 2), 3: entry(-0.5, 1)}
    outside = {9: entry(-8.0, 40), 3: entry(-0.5, 1), 7: entry(-1.5, 2)}
    completion = SimpleNamespace(token_ids=[7, 9], logprobs=[inside, outside])
    top = ((3, -0.5), (7, -1.5))
    assert logprobs_of(completion, 2) == (TokenLogprob(-1.5, top), TokenLogprob(-8.0, top))


def test_only_the_sampled_tokens_logprob_has_no_top() -> None:
    completion = SimpleNamespace(token_ids=[7], logprobs=[{7: entry(-1.5, 2)}])
    assert logprobs_of(completion, 0) == (TokenLogprob(-1.5),)


def test_no_logprobs_are_read_unless_asked_for() -> None:
    assert logprobs_of(SimpleNamespace(token_ids=[7], logprobs=None), None) is None
    assert logprobs_of(SimpleNamespace(token_ids=[], logprobs=None), 3) == ()


def test_missing_logprobs_are_an_error() -> None:
    with pytest.raises(EngineError, match="0 log probabilities for 1"):
        logprobs_of(SimpleNamespace(token_ids=[7], logprobs=None), 3)


@pytest.mark.parametrize("worst", [-math.inf, math.nan])
def test_a36_logprobs_from_vllm_are_finite(worst: float) -> None:
    row = {7: entry(worst, 2), 3: entry(-0.5, 1)}
    completion = SimpleNamespace(token_ids=[7], logprobs=[row])
    expected = TokenLogprob(LOGPROB_FLOOR, ((3, -0.5), (7, LOGPROB_FLOOR)))
    assert logprobs_of(completion, 2) == (expected,)
