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
    prompt_logprobs_of,
    sampling_arguments,
)
from kvmesh.errors import ContextLengthError, EngineError, InvalidRequestError
from kvmesh.types import LOGPROB_FLOOR, FinishReason, Sampling, TokenLogprob

EOS = frozenset({2})


def ask(token_ids: list[int], **sampling: object) -> EngineRequest:
    return EngineRequest("r", token_ids, Sampling(**sampling))  # type: ignore[arg-type]


def test_a_request_that_fits_exactly_is_accepted() -> None:
    check_request(ask([0, 9], max_tokens=8), context_length=10, vocab_size=10, eos_token_ids=EOS)
    check_request(ask([1] * 9), context_length=10, vocab_size=10, eos_token_ids=EOS)


@pytest.mark.parametrize("token_ids", [[], [-1], [3, 10]])
def test_bad_prompts_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(
            ask(token_ids, max_tokens=1), context_length=10, vocab_size=10, eos_token_ids=EOS
        )
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", (9, 10)),
        ("logit_bias", ((9, 1.0), (10, 1.0))),
        ("allowed_token_ids", (9, 10)),
    ],
)
def test_a44_ids_outside_of_the_vocabulary_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="10") as caught:
        check_request(
            ask([1], max_tokens=1, **{field: value}),
            context_length=10,
            vocab_size=10,
            eos_token_ids=EOS,
        )
    assert caught.value.field == field
    check_request(
        ask([1], max_tokens=1, **{field: value}),
        context_length=10,
        vocab_size=11,
        eos_token_ids=EOS,
    )


@pytest.mark.parametrize(
    ("length", "max_tokens", "field"),
    [(10, None, "prompt"), (11, 1, "prompt"), (5, 6, "max_tokens")],
)
def test_what_does_not_fit_the_context_is_refused(
    length: int, max_tokens: int | None, field: str
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        check_request(
            ask([1] * length, max_tokens=max_tokens),
            context_length=10,
            vocab_size=10,
            eos_token_ids=EOS,
        )
    assert caught.value.field == field


def test_the_completion_is_as_long_as_asked_or_as_fits() -> None:
    assert completion_limit(ask([1] * 4, max_tokens=3), 10) == 3
    assert completion_limit(ask([1] * 4), 10) == 6


def test_a11_zero_is_zero_and_unset_is_the_models_default() -> None:
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
        ("stop", 2, Finish(FinishReason.STOP, 3)),
        ("stop", None, Finish(FinishReason.STOP, 3)),
        ("length", None, Finish(FinishReason.LENGTH, 3)),
    ],
)
def test_ends(finish_reason: str, stop_reason: int | None, expected: Finish) -> None:
    completion = SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)
    assert finish_of(completion, 3, (7, 8)) == expected


@pytest.mark.parametrize("finish_reason", ["abort", "error", "something-new"])
def test_failures_are_errors(finish_reason: str) -> None:
    completion = SimpleNamespace(finish_reason=finish_reason, stop_reason=None)
    with pytest.raises(EngineError, match=finish_reason):
        finish_of(completion, 0, ())


def test_biases_and_logprobs_go_to_vllm_as_it_wants_them() -> None:
    asked = Sampling(
        logit_bias=((5, 1.5),),
        allowed_token_ids=(5, 6),
        logprobs=0,
        prompt_logprobs=0,
        bad_words=((5,), (7, 8)),
    )
    arguments = sampling_arguments(asked, {}, EOS, 9)
    assert (arguments["logit_bias"], arguments["allowed_token_ids"]) == ({5: 1.5}, [5, 6])
    assert (arguments["logprobs"], arguments["prompt_logprobs"]) == (0, 0)
    assert arguments["_bad_words_token_ids"] == [[5], [7, 8]]
    neutral = sampling_arguments(Sampling(), {}, EOS, 9)
    assert neutral["_bad_words_token_ids"] is None
    assert (neutral["logit_bias"], neutral["allowed_token_ids"]) == (None, None)
    assert (neutral["logprobs"], neutral["prompt_logprobs"]) == (None, None)


@pytest.mark.parametrize("seed", [None, -(2**63), -2, 0, 1, 2**31, 2**32, 2**63 - 1])
def test_a49_seeds_are_kept(seed: int | None) -> None:
    assert sampling_arguments(Sampling(seed=seed), {}, EOS, 9)["seed"] == seed


def test_a49_vllm_is_not_given_the_seed_that_it_takes_for_none() -> None:
    assert sampling_arguments(Sampling(seed=-1), {}, EOS, 9)["seed"] not in (-1, None)


def test_what_is_allowed_must_not_all_be_banned() -> None:
    def check(**sampling: object) -> None:
        asked = ask([1], min_tokens=1, stop_token_ids=(7,), **sampling)
        check_request(asked, context_length=10, vocab_size=10, eos_token_ids=EOS)

    with pytest.raises(InvalidRequestError) as caught:
        check(allowed_token_ids=(2, 7))
    assert caught.value.field == "allowed_token_ids"
    check(allowed_token_ids=(2, 7, 8))
    check(allowed_token_ids=(2, 7), ignore_eos=True)


def entry(logprob: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_logprobs_are_the_sampled_tokens_and_the_likeliest_in_order() -> None:
    inside = {7: entry(-1.5, 2), 3: entry(-0.5, 1)}
    outside = {9: entry(-8.0, 40), 3: entry(-0.5, 1), 7: entry(-1.5, 2)}
    completion = SimpleNamespace(token_ids=[7, 9], logprobs=[inside, outside])
    top = ((3, -0.5), (7, -1.5))
    expected = (TokenLogprob(-1.5, top, 2), TokenLogprob(-8.0, top, 40))
    assert logprobs_of(completion, 2) == expected


def test_only_the_sampled_tokens_logprob_has_no_top() -> None:
    completion = SimpleNamespace(token_ids=[7], logprobs=[{7: entry(-1.5, 2)}])
    assert logprobs_of(completion, 0) == (TokenLogprob(-1.5, (), 2),)


def test_no_logprobs_are_read_unless_asked_for() -> None:
    assert logprobs_of(SimpleNamespace(token_ids=[7], logprobs=None), None) is None
    assert logprobs_of(SimpleNamespace(token_ids=[], logprobs=None), 3) == ()


def test_prompt_logprobs_are_those_of_all_tokens_but_the_first() -> None:
    rows = [None, {7: entry(-1.5, 2), 3: entry(-0.5, 1)}, {3: entry(-0.25, 1)}]
    request = ask([1, 7, 3], prompt_logprobs=1)
    expected = (TokenLogprob(-1.5, ((3, -0.5),), 2), TokenLogprob(-0.25, ((3, -0.25),), 1))
    assert prompt_logprobs_of(request, SimpleNamespace(prompt_logprobs=rows)) == expected


def test_prompt_logprobs_come_once_and_only_if_asked_for() -> None:
    later, unasked = SimpleNamespace(prompt_logprobs=[]), SimpleNamespace(prompt_logprobs=None)
    assert prompt_logprobs_of(ask([1, 7], prompt_logprobs=0), later) is None
    assert prompt_logprobs_of(ask([1, 7]), unasked) is None
    alone = SimpleNamespace(prompt_logprobs=[None])
    assert prompt_logprobs_of(ask([1], prompt_logprobs=0), alone) == ()


def test_missing_prompt_logprobs_are_an_error() -> None:
    with pytest.raises(EngineError, match="1 log probabilities for 2"):
        prompt_logprobs_of(ask([1, 7], prompt_logprobs=0), SimpleNamespace(prompt_logprobs=[None]))


def test_missing_logprobs_are_an_error() -> None:
    with pytest.raises(EngineError, match="0 log probabilities for 1"):
        logprobs_of(SimpleNamespace(token_ids=[7], logprobs=None), 3)


@pytest.mark.parametrize("worst", [-math.inf, math.nan])
def test_a36_logprobs_from_vllm_are_finite(worst: float) -> None:
    row = {7: entry(worst, 2), 3: entry(-0.5, 1)}
    completion = SimpleNamespace(token_ids=[7], logprobs=[row])
    expected = TokenLogprob(LOGPROB_FLOOR, ((3, -0.5), (7, LOGPROB_FLOOR)), 2)
    assert logprobs_of(completion, 2) == (expected,)
