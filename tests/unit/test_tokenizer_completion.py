import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvmesh.errors import EngineError, InvalidRequestError
from kvmesh.testing.tokenizer_folders import byte_level_folder, wordpiece_folder
from services.tokenizer.completion import CompletionText
from services.tokenizer.detokenize import Vocabulary
from services.tokenizer.stops import StopMatcher

repeatable = settings(deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=[byte_level_folder, wordpiece_folder])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder = request.param(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def run(tokenizer, ids, stops, cuts, *, include_stop=False):
    """Push in pieces; return (text, token count, stop string)."""
    matcher = StopMatcher(stops, include_stop=include_stop) if stops else None
    completion = CompletionText(Vocabulary(tokenizer).detokenizer(), matcher)
    text, start = "", 0
    for end in sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)}):
        text += completion.push(start, ids[start:end])
        if completion.stop_string is not None:
            return text, completion.token_count, completion.stop_string
        start = end
    return text + completion.finish(), completion.token_count, completion.stop_string


words = st.lists(st.sampled_from(["the ", "capital ", "of ", "🛑", "Paris", ", ", "\n"]))
stops = st.lists(st.sampled_from(["capital", " of", "🛑", "Paris, the", "l o", "zzz"]), max_size=3)


@repeatable
@given(words.map("".join), stops, st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_text_and_count_do_not_depend_on_the_cuts(tokenizer, text, stops, cuts, include_stop):
    ids = tokenizer.encode(text).ids
    one_by_one = run(tokenizer, ids, stops, range(len(ids)), include_stop=include_stop)
    assert run(tokenizer, ids, stops, cuts, include_stop=include_stop) == one_by_one


@repeatable
@given(words.map("".join), stops.filter(bool))
def test_tokens_are_counted_up_to_the_one_that_completed_the_stop(tokenizer, text, stops):
    ids = tokenizer.encode(text).ids
    _, count, stop = run(tokenizer, ids, stops, [])
    if stop is None:
        assert count == len(ids)
    else:
        assert stop in tokenizer.decode(ids[:count])
        assert not any(other in tokenizer.decode(ids[: count - 1]) for other in stops)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_gaps_and_repeats_are_refused(tokenizer, offset):
    completion = CompletionText(Vocabulary(tokenizer).detokenizer())
    completion.push(0, tokenizer.encode("the").ids[:1] * 2)
    with pytest.raises(InvalidRequestError) as caught:
        completion.push(offset, [5])
    assert caught.value.field == "offset"


def test_a54_a_bad_id_does_not_count(tokenizer):
    completion = CompletionText(Vocabulary(tokenizer).detokenizer(), StopMatcher(["x"]))
    with pytest.raises(EngineError):
        completion.push(0, [5, 10**6])
    assert completion.token_count == 0


def test_a_stop_string_may_end_in_what_is_flushed(tmp_path):
    tokenizer = Tokenizer.from_file(str(byte_level_folder(tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode("a🙂").ids[:-1]
    assert run(tokenizer, ids, ["\ufffd"], []) == ("a", len(ids), "\ufffd")
