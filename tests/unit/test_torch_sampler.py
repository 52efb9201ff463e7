"""Picking tokens: the distributions drawn from, and that draws follow them."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.base import EngineRequest
from kvmesh.engine.sequence import Kind, Limits
from kvmesh.engine.torch.plan import Span
from kvmesh.engine.torch.sampler import measure, noise, penalize, pick, probabilities, score
from kvmesh.engine.torch.sequence import Knobs, TorchSequence
from kvmesh.types import LOGPROB_FLOOR, Sampling, TokenLogprob

VOCAB = 200
LIMITS = Limits(VOCAB, 1 << 20, frozenset((2,)), VOCAB)


def sequence(tokens: Sequence[int], prompt: int | None = None, **sampling: Any) -> TorchSequence:
    prompt = len(tokens) if prompt is None else prompt
    request = EngineRequest("r", tokens[:prompt], Sampling(**sampling))
    one = TorchSequence(request, Kind.GENERATE, None, lambda _: None, LIMITS)
    one.pick_with(Knobs(), random.Random(0))
    for token in tokens[prompt:]:
        one.take(token)
    return one


def logits(seed: int = 0, rows: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * 3


def kept(probs: Any) -> set[int]:
    return set(probs.nonzero().flatten().tolist())


def ranked(row: Any) -> list[int]:
    return row.argsort(descending=True).tolist()  # type: ignore[no-any-return]


def test_greedy_is_the_largest() -> None:
    rows = logits(rows=3)
    picked = pick(rows, [sequence([1], temperature=0.0) for _ in range(3)])
    assert picked == rows.argmax(-1).tolist()


def test_rows_are_picked_alike_whoever_else_is_there() -> None:
    rows = logits(rows=4)
    four = [
        sequence([1], temperature=0.0),
        sequence([1], seed=1),
        sequence([1], temperature=0.0, repetition_penalty=1.5),
        sequence([1], temperature=0.0),
    ]
    together = pick(rows, four)
    assert together == [pick(rows[at : at + 1], [four[at]])[0] for at in range(4)]


@pytest.mark.parametrize("count", [1, 5, VOCAB - 1, VOCAB, VOCAB + 1])
def test_top_k(count: int) -> None:
    row = logits()[0]
    assert kept(probabilities(row, Knobs(top_k=count))) == set(ranked(row)[:count])


@given(top_p=st.floats(0.01, 0.999), seed=st.integers(0, 5))
def test_top_p_is_the_fewest_that_have_the_mass(top_p: float, seed: int) -> None:
    row = logits(seed)[0]
    expected: set[int] = set()
    mass, probs = 0.0, torch.softmax(row, -1)
    for token in ranked(row):
        if mass >= top_p - 1e-6:
            break
        expected.add(token)
        mass += float(probs[token])
    assert kept(probabilities(row, Knobs(top_p=top_p))) == expected


def test_top_p_of_a_flat_distribution_looks_at_all() -> None:
    row = torch.zeros(50_000) + torch.linspace(0, 1e-2, 50_000)
    assert len(kept(probabilities(row, Knobs(top_p=0.9)))) == pytest.approx(45_000, rel=0.01)


def test_top_p_counts_what_top_k_leaves() -> None:
    row = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert kept(probabilities(row, Knobs(top_k=2, top_p=0.5))) == {0}
    assert kept(probabilities(row, Knobs(top_p=0.5))) == {0, 1}


def test_min_p_is_a_share_of_the_largest() -> None:
    row = torch.log(torch.tensor([0.5, 0.3, 0.06, 0.04]))
    assert kept(probabilities(row, Knobs(min_p=0.1))) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_the_coldest_is_greedy(temperature: float) -> None:
    row = logits()[0]
    assert kept(probabilities(row, Knobs(temperature=temperature))) <= {int(row.argmax())}


def test_draws_follow_the_distribution() -> None:
    row = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    draws = Counter(pick(row[None], [sequence([3], seed=seed)])[0] for seed in range(4000))
    assert [draws[token] / 4000 for token in range(4)] == pytest.approx(
        [0.5, 0.25, 0.125, 0.125], abs=0.03
    )


def test_draws_depend_on_the_position() -> None:
    flat = torch.zeros(1, VOCAB)
    picks = [pick(flat, [sequence([1] * length, seed=5)])[0] for length in range(1, 30)]
    assert len(set(picks)) > 20


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 1 << 20))
def test_noise_is_inside_and_repeats(seed: int, position: int) -> None:
    ids = np.arange(1000)
    found = noise(seed, position, ids)
    assert 0 < found.min() < found.max() < 1
    assert (noise(seed, position, ids[500:]) == found[500:]).all()
    assert len(set(found.tolist())) == 1000
    assert abs(found.mean() - 0.5) < 0.06


def test_noise_never_changes() -> None:
    """Workers of two versions must agree."""
    assert noise(1, 2, np.array([0, 3])).tolist() == [0.48088713445285614, 0.5350494085979346]


def test_a_rounding_error_hardly_changes_a_draw() -> None:
    row = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    other = row + 1e-6 * torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    for seed in range(60):
        one, two = (pick(each[None], [sequence([1], seed=seed)]) for each in (row, other))
        assert one == two


def test_repetition_penalty_counts_prompt_and_completion() -> None:
    row = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    penalize(row, Knobs(repetition_penalty=2.0), [0, 1, 2, 2], 2)
    assert row.tolist() == [1.0, -4.0, 1.0, -2.0, 2.0]


def test_presence_and_frequency_count_the_completion_only() -> None:
    row = torch.zeros(4)
    penalize(row, Knobs(presence_penalty=1.0, frequency_penalty=0.25), [0, 0, 1, 2, 2], 2)
    assert row.tolist() == [0.0, -1.25, -1.5, 0.0]


def test_nothing_is_penalized_before_there_is_a_completion() -> None:
    row = torch.zeros(4)
    penalize(row, Knobs(presence_penalty=1.0), [0, 1], 2)
    assert row.tolist() == [0.0] * 4


def test_what_would_end_is_banned_until_min_tokens() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 2] = 9.0  # the model's end
    row[0, 7] = 8.0
    row[0, 5] = 7.0
    asked = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (7,)}
    assert pick(row, [sequence([1, 5], 1, **asked)]) == [5]
    assert pick(row, [sequence([1, 5, 5], 1, **asked)]) == [2]
    assert pick(row, [sequence([1, 5], 1, ignore_eos=True, **asked)]) == [2]


def test_logits_are_left_as_they_are() -> None:
    rows = logits()
    before = rows.clone()
    pick(rows, [sequence([1], min_tokens=1, seed=1, repetition_penalty=2.0)])
    assert torch.equal(rows, before)


def test_a_bias_forces_a_token_or_forbids_it() -> None:
    rows = logits()
    best, second, *_, worst = ranked(rows[0])
    forced, forbidden = ((worst, 100.0),), ((best, -100.0),)
    assert pick(rows, [sequence([1], temperature=0.0, logit_bias=forced)]) == [worst]
    assert pick(rows, [sequence([1], temperature=0.0, logit_bias=forbidden)]) == [second]
    for seed in range(50):
        assert pick(rows, [sequence([1], seed=seed, logit_bias=forced)]) == [worst]
        assert pick(rows, [sequence([1], seed=seed, logit_bias=forbidden)]) != [best]


def test_biases_are_added_before_the_penalties_and_lift_no_ban() -> None:
    row = torch.tensor([[4.0, 0.0, 0.0, 1.0]])
    asked = {"temperature": 0.0, "repetition_penalty": 2.0, "logit_bias": ((1, 6.0),)}
    assert pick(row, [sequence([1], **asked)]) == [0]  # 6 / 2 is below 4
    ban = {"temperature": 0.0, "min_tokens": 1, "logit_bias": ((2, 100.0),)}
    assert pick(row, [sequence([1], **ban)]) == [0]


def test_a_bias_is_one_requests_own() -> None:
    rows = logits(rows=2)
    biased = sequence([1], temperature=0.0, logit_bias=((7, 100.0),))
    assert pick(rows, [biased, sequence([1], temperature=0.0)]) == [7, int(rows[1].argmax())]


def test_only_what_is_allowed_is_picked() -> None:
    rows = logits(rows=2)
    best, *_, third, second = ranked(rows[0])
    asked = {"temperature": 0.0, "allowed_token_ids": (third, second)}
    free = sequence([1], temperature=0.0)
    assert pick(rows, [sequence([1], **asked), free]) == [third, int(rows[1].argmax())]
    hot = {"temperature": 9.0, "allowed_token_ids": (third, second), "top_p": 0.9999}
    draws = Counter(pick(rows[:1], [sequence([1], seed=seed, **hot)])[0] for seed in range(100))
    assert set(draws) == {third, second}
    assert best not in draws


def test_a_bias_lifts_nothing_that_is_not_allowed() -> None:
    asked = {"temperature": 0.0, "allowed_token_ids": (3,), "logit_bias": ((5, 100.0),)}
    assert pick(logits(), [sequence([1], **asked)]) == [3]


def test_a_ban_counts_among_the_allowed() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 7] = 8.0
    asked = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (7,)}
    held = {**asked, "allowed_token_ids": (7, 8)}
    assert pick(row, [sequence([1, 5], 1, **held)]) == [8]
    assert pick(row, [sequence([1, 5, 5], 1, **held)]) == [7]


def test_a49_seeds_below_zero_are_streams_of_their_own() -> None:
    flat = torch.zeros(1, VOCAB)
    seeds = (-(2**63), -2, -1, 0, 1, 2**31, 2**32, 2**63 - 1)
    streams = {
        tuple(pick(flat, [sequence([1] * n, seed=seed)])[0] for n in range(1, 9)) for seed in seeds
    }
    assert len(streams) == len(seeds)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
def test_each_of_many_rows_is_scored_by_itself(length: int) -> None:
    rng = random.Random(length)
    one, other = (
        sequence([rng.randrange(VOCAB) for _ in range(length + 5)], prompt_logprobs=count)
        for count in (2, 0)
    )
    spans = [
        Span(one, (), 0, length, False, range(1, length + 1)),
        Span(sequence([1, 2]), (), 0, 2, True),
        Span(other, (), 0, 5, False, range(4, 5)),
    ]
    rows = logits(rows=length + 1)
    found, none, (last,) = score(rows, spans)
    expected = torch.log_softmax(rows, -1)
    assert none == []
    assert len(found) == length
    for at, each in enumerate(found):
        assert each.logprob == pytest.approx(float(expected[at, one.tokens[at + 2]]))
        assert [token for token, _ in each.top] == ranked(rows[at])[:2]
        assert each.rank == ranked(rows[at]).index(one.tokens[at + 2]) + 1
    assert last.logprob == pytest.approx(float(expected[length, other.tokens[5]]))
    assert last.top == ()


def one_measured(row: Any, token: int, **sampling: Any) -> TokenLogprob:
    (found,) = measure(row[None], [sequence([1], **sampling)], [token])
    assert found is not None
    return found


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    row = logits()[0]
    expected = torch.log_softmax(row, -1)
    found = one_measured(
        row, 9, logprobs=5, temperature=0.2, logit_bias=((9, 50.0),), repetition_penalty=1.7
    )
    assert found.logprob == pytest.approx(float(expected[9]))
    assert [token for token, _ in found.top] == ranked(row)[:5]
    assert [value for _, value in found.top] == pytest.approx(expected[ranked(row)[:5]].tolist())


def test_only_those_who_ask_get_logprobs() -> None:
    rows = logits(rows=3)
    asked = [sequence([1]), sequence([1], logprobs=0), sequence([1], logprobs=2)]
    none, sampled, top = measure(rows, asked, [3, 4, 5])
    assert none is None
    assert sampled is not None
    assert sampled.top == ()
    assert sampled.logprob == pytest.approx(float(torch.log_softmax(rows[1], -1)[4]))
    assert top is not None
    assert len(top.top) == 2


def test_those_who_are_as_likely_share_the_first_place() -> None:
    row = torch.tensor([1.0, 3.0, 1.0, 1.0])
    assert [one_measured(row, token, logprobs=0).rank for token in range(4)] == [2, 1, 2, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_not_completed(temperature: float) -> None:
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, [5, 6, 7]] = torch.tensor([9.0, 8.0, 7.0])
    asked = {"temperature": temperature, "top_k": 1, "bad_words": ((5, 5), (5, 6), (6,))}
    assert pick(row, [sequence([5], 1, **asked)]) == [5]
    assert pick(row, [sequence([5, 5], 1, **asked)]) == [7]
    assert pick(row, [sequence([5, 7], 1, **asked)]) == [5]


def test_a_small_vocabulary_has_no_more_than_itself() -> None:
    assert len(one_measured(torch.zeros(4), 0, logprobs=20).top) == 4


@pytest.mark.parametrize("worst", [-torch.inf, torch.nan, torch.inf])
def test_a36_scores_are_finite_whatever_the_logits(worst: float) -> None:
    rows = torch.tensor([[1.0, worst, 0.0], [0.0, 1.0, 2.0]])
    span = Span(sequence([0, 1, 2], prompt_logprobs=3), (), 0, 3, True, range(2))
    (found,) = score(rows, [span])
    for each in found:
        values = [each.logprob, *(value for _, value in each.top)]
        assert all(LOGPROB_FLOOR <= value <= 0 for value in values)


@pytest.mark.parametrize("worst", [-torch.inf, torch.nan, torch.inf])
def test_a36_logprobs_are_finite_whatever_the_logits(worst: float) -> None:
    row = torch.tensor([1.0, worst, 0.0])
    found = one_measured(row, 1, logprobs=3)
    values = [found.logprob, *(value for _, value in found.top)]
    assert all(LOGPROB_FLOOR <= value <= 0 for value in values)


def test_a36_the_impossible_is_at_the_floor() -> None:
    found = one_measured(torch.tensor([0.0, -torch.inf]), 1, logprobs=2)
    assert found == TokenLogprob(LOGPROB_FLOOR, ((0, 0.0), (1, LOGPROB_FLOOR)), 2)


def test_half_precision_logits_are_measured_in_single() -> None:
    row = logits()[0].to(torch.bfloat16)
    expected = float(torch.log_softmax(row.float(), -1)[3])
    assert one_measured(row, 3, logprobs=0).logprob == pytest.approx(expected)
