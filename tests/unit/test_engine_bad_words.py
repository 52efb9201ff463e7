"""Which token would complete a sequence that must not come about."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.bad_words import BadWords

tokens = st.lists(st.integers(0, 3), max_size=8)
sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


@given(sequences, tokens, st.integers(0, 8))
def test_it_is_what_comparing_each_sequence_finds(
    words: list[list[int]], given: list[int], start: int
) -> None:
    generated = given[start:]
    expected = {
        word[-1]
        for word in words
        if [*generated, word[-1]][-len(word) :] == word and len(word) <= len(generated) + 1
    }
    assert BadWords(words).banned(given, start) == expected


@pytest.mark.parametrize(
    ("words", "generated", "banned"),
    [
        ([[5]], [], {5}),
        ([[5]], [5, 1], {5}),
        ([[5, 6]], [], set()),
        ([[5, 6]], [5], {6}),
        ([[5, 6]], [6], set()),
        ([[5, 6, 7], [6, 8], [9]], [5, 6], {7, 8, 9}),
        ([[5, 5, 5]], [5, 5], {5}),
        ([[5, 5, 5]], [5], set()),
    ],
)
def test_the_last_token_is_banned_behind_the_others(
    words: list[list[int]], generated: list[int], banned: set[int]
) -> None:
    found = BadWords(words)
    assert found.banned([1, 2, *generated], 2) == banned
    assert found.lasts == {word[-1] for word in words}


def test_a_prompt_does_not_begin_a_word() -> None:
    assert BadWords([[5, 6]]).banned([5], 1) == set()
    assert BadWords([[5, 6, 7]]).banned([5, 6], 1) == set()
