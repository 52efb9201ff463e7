"""The simulated model's distribution, and what is picked from it."""

import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.sim.model import SimModel
from kvmesh.engine.sim.ranking import choose, ranking, told

PLAIN = SimModel(origin=0, block_size=4, low=5, high=60, eos_token_id=2)
ENDING = SimModel(origin=0, block_size=4, low=5, high=60, eos_token_id=2, eos_probability=0.5)
INSIDE = SimModel(origin=0, block_size=4, low=5, high=60, eos_token_id=9, eos_probability=0.5)

models = st.sampled_from([PLAIN, ENDING, INSIDE])
digests = st.integers(0, 2**64 - 1)
few = st.frozensets(st.integers(0, 59), max_size=30)


@given(model=models, digest=digests)
def test_all_ids_have_a_place(model: SimModel, digest: int) -> None:
    order = ranking(model, digest)
    assert sorted(order) == list(range(60))
    assert [order.rank(token) for token in order] == list(range(60))


@given(model=models, digest=digests)
def test_probabilities_add_up_to_one(model: SimModel, digest: int) -> None:
    order = ranking(model, digest)
    values = [order.logprob(token) for token in order]
    assert values == sorted(values, reverse=True)
    assert math.fsum(map(math.exp, values)) == pytest.approx(1 - 1 / 61)


@given(model=models, digest=digests, salt=st.integers(0, 9), banned=few)
def test_the_first_that_is_not_banned_is_picked(
    model: SimModel, digest: int, salt: int, banned: frozenset[int]
) -> None:
    order = ranking(model, digest, salt)
    first = next(token for token in order if token not in banned)
    assert choose(order, banned=banned, bias={}, allowed=()) == first
    if banned < set(range(5, 60)):
        assert model.pick(digest, salt, banned) == first


@given(
    model=models,
    digest=digests,
    banned=few,
    bias=st.dictionaries(st.integers(0, 59), st.floats(-100, 100), max_size=9),
    allowed=st.frozensets(st.integers(0, 59)),
)
def test_the_choice_is_the_best_of_all(
    model: SimModel, digest: int, banned: frozenset[int], bias: dict[int, float],
    allowed: frozenset[int],
) -> None:  # fmt: skip
    order = ranking(model, digest)
    choices = [token for token in allowed or order if token not in banned]
    if choices:
        best = max(order.logprob(token) + bias.get(token, 0.0) for token in choices)
        found = choose(order, banned=banned, bias=bias, allowed=allowed)
        assert found in choices
        assert order.logprob(found) + bias.get(found, 0.0) == best


@given(model=models, digest=digests, token=st.integers(0, 59), count=st.integers(0, 20))
def test_what_is_told(model: SimModel, digest: int, token: int, count: int) -> None:
    order = ranking(model, digest)
    found = told(order, token, count)
    assert found.logprob == order.logprob(token)
    assert found.rank == 1 + sum(order.logprob(each) > found.logprob for each in order)
    assert found.top == tuple((each, order.logprob(each)) for each in islice(order, count))
