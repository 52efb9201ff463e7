import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.stops import StopMatcher

repeatable = settings(deadline=None, derandomize=True)
LETTERS = "ab\n🛑"
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)
pieces = st.lists(st.text(LETTERS, max_size=6), max_size=12)


def run(stops, parts, *, include_stop=False):
    """Push all parts; return (text, matched)."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    text = "".join(matcher.push(part) for part in parts)
    return text + matcher.flush(), matcher.matched


def expected(stops, text, *, include_stop=False):
    """The rule, spelled out: the first end of a match wins, then the longest stop string."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop
    return text, None


@repeatable
@given(stop_lists, pieces, st.booleans())
def test_text_and_match_do_not_depend_on_the_cuts(stops, parts, include_stop):
    assert run(stops, parts, include_stop=include_stop) == expected(
        stops, "".join(parts), include_stop=include_stop
    )


@repeatable
@given(stop_lists, pieces, st.randoms(use_true_random=False))
def test_the_order_of_the_list_does_not_matter(stops, parts, rng):
    shuffled = list(stops)
    rng.shuffle(shuffled)
    assert run(shuffled, parts) == run(stops, parts)


@repeatable
@given(stop_lists, pieces)
def test_exactly_what_may_become_a_stop_string_is_held_back(stops, parts):
    matcher = StopMatcher(stops)
    sent = pushed = ""
    for part in parts:
        sent += matcher.push(part)
        pushed += part
        if matcher.matched is not None:
            return
        held = pushed[len(sent) :]
        longest = max(
            (size for stop in stops for size in range(len(stop)) if pushed.endswith(stop[:size])),
            default=0,
        )
        assert pushed == sent + held
        assert len(held) == longest


@pytest.mark.parametrize(
    ("stop", "tokens", "sent"),
    [
        ("DEFGHIJ", ["ABC", " ", "DEF", "GH", "I", "J", " K"], "ABC "),
        ("\nObservation", ["Thought", ":", "\n", "Observ", "ation", " x"], "Thought:"),
        ("🛑", ["go ", "🛑", " on"], "go "),
    ],
)
def test_a06_no_character_of_a_stop_string_is_sent(stop, tokens, sent):
    assert run([stop], tokens) == (sent, stop)


def test_a06_held_text_is_released_as_soon_as_it_cannot_match():
    matcher = StopMatcher(["\nObservation"])
    assert matcher.push("done.\n") == "done."
    assert matcher.push("O") == ""
    assert matcher.push("ther") == "\nOther"
    assert matcher.push("\n") == ""
    assert matcher.flush() == "\n"
    assert matcher.matched is None


def test_consumed_is_the_part_of_the_piece_that_completed_the_match():
    matcher = StopMatcher(["abc"])
    assert matcher.push("xa") == "x"
    assert matcher.push("bcde") == ""
    assert (matcher.matched, matcher.consumed) == ("abc", 2)


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", ["]", "^", "\\", "-", "[a", "\0"])
def test_stop_strings_are_not_patterns(stop):
    assert run([stop], ["before", stop, "after"]) == ("before", stop)


@pytest.mark.parametrize("stops", [[""], ["x", ""], []])
def test_a56_an_empty_stop_string_is_refused(stops):
    with pytest.raises(ValueError, match="stop string"):
        StopMatcher(stops)


def test_a_long_stop_string_that_almost_matches_costs_no_more_than_its_text():
    # Quadratic work would take minutes here.
    rng = random.Random(1)
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher([stop])
    sent = 0
    for _ in range(2_000):
        sent += len(matcher.push("a" * rng.randrange(60)))
    assert matcher.matched is None
    assert matcher.push("b" + "c") == ""
    assert matcher.matched == stop
    assert sent > 0
