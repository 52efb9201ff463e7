from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from kvmesh.errors import EngineError
from kvmesh.testing.tokenizer_folders import (
    byte_level_folder,
    sentencepiece_folder,
    wordpiece_folder,
)
from services.tokenizer.detokenize import MAX_HELD_TOKENS, REPLACEMENT, Vocabulary

repeatable = settings(deadline=None, derandomize=True)
FOLDERS = {
    "byte_level": byte_level_folder,
    "sentencepiece": sentencepiece_folder,
    "wordpiece": wordpiece_folder,
}
TRICKY = [
    "삼겹살",
    "🙂",
    "👨‍👩‍👧‍👦",
    "🇰🇷🇫🇷",
    "e\u0301",
    "a\ufffdb",
    "  two  spaces",
    "\n\n\t",
    "“quoted” naïve",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    return {
        name: Tokenizer.from_file(str(make(folder / name) / "tokenizer.json"))
        for name, make in FOLDERS.items()
    }


@pytest.fixture(scope="module")
def vocabularies(tokenizers) -> dict[str, Vocabulary]:
    return {name: Vocabulary(tokenizer) for name, tokenizer in tokenizers.items()}


def stream(detokenizer, ids, cuts=()):
    """Push the ids in pieces that end at `cuts`; return the deltas, the flush last."""
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    start, deltas = 0, []
    for end in ends:
        deltas.append(detokenizer.push(ids[start:end]))
        start = end
    return [*deltas, detokenizer.flush()]


def whole(kind: str, tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> str:
    """Return what the tokenizer itself makes of the ids, as a continuation of a prompt."""
    if kind != "sentencepiece":
        return tokenizer.decode(ids, skip_special_tokens=skip)
    anchor = tokenizer.encode("a", add_special_tokens=False).ids
    before = tokenizer.decode(anchor)
    return tokenizer.decode(anchor + ids, skip_special_tokens=skip).removeprefix(before)


texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*TRICKY, " the", "capital", "<|im_end|>", " ", "1"])).map("".join),
)
cuts = st.lists(st.integers(0, 60), max_size=10)


@pytest.mark.parametrize("kind", FOLDERS)
@repeatable
@given(text=texts, cuts=cuts)
def test_deltas_of_a_text_make_up_its_whole_decode(tokenizers, vocabularies, kind, text, cuts):
    ids = tokenizers[kind].encode(text, add_special_tokens=False).ids
    deltas = stream(vocabularies[kind].detokenizer(), ids, cuts)
    assert "".join(deltas) == whole(kind, tokenizers[kind], ids)


@repeatable
@given(st.lists(st.integers(0, 500), max_size=40), cuts, st.booleans())
def test_deltas_of_any_byte_level_ids_make_up_their_whole_decode(
    tokenizers, vocabularies, ids, cuts, keep
):
    ids = [id_ % vocabularies["byte_level"].size for id_ in ids]
    detokenizer = vocabularies["byte_level"].detokenizer(keep_special=keep)
    decoded = tokenizers["byte_level"].decode(ids, skip_special_tokens=not keep)
    assert "".join(stream(detokenizer, ids, cuts)) == decoded


@pytest.mark.parametrize("kind", FOLDERS)
@repeatable
@given(text=texts)
def test_a52_only_whole_characters_are_sent(tokenizers, vocabularies, kind, text):
    ids = tokenizers[kind].encode(text, add_special_tokens=False).ids
    deltas = stream(vocabularies[kind].detokenizer(), ids, range(len(ids)))
    decoded = whole(kind, tokenizers[kind], ids)
    assert REPLACEMENT in decoded or REPLACEMENT not in "".join(deltas)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", TRICKY)
def test_a52_stopping_after_any_token_gives_the_whole_characters_so_far(
    tokenizers, vocabularies, kind, text
):
    ids = tokenizers[kind].encode(text, add_special_tokens=False).ids
    decoded = whole(kind, tokenizers[kind], ids)
    for count in range(len(ids) + 1):
        so_far = "".join(stream(vocabularies[kind].detokenizer(), ids[:count], range(count)))
        if kind == "byte_level":
            assert so_far == tokenizers[kind].decode(ids[:count])
        # With byte fallback the tokenizer's own decode gives up the whole run of bytes.
        assert decoded.startswith(so_far) or decoded.startswith(so_far.removesuffix(REPLACEMENT))


def test_a05_a_character_begun_in_the_prompt_gives_no_prompt_text(tokenizers, vocabularies):
    ids = tokenizers["byte_level"].encode("Hello world 🌶").ids
    detokenizer = vocabularies["byte_level"].detokenizer()
    # The prompt kept the first three bytes; only the last one is generated.
    assert detokenizer.push(ids[-1:]) + detokenizer.flush() == REPLACEMENT


def test_an_unfinished_character_is_flushed_as_one_replacement_character(tokenizers, vocabularies):
    ids = tokenizers["byte_level"].encode("ok 🙂").ids
    detokenizer = vocabularies["byte_level"].detokenizer()
    assert detokenizer.push(ids[:-1]) == "ok "
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_a_character_that_breaks_off_comes_before_the_next_token(tokenizers, vocabularies):
    detokenizer = vocabularies["byte_level"].detokenizer()
    assert detokenizer.push(tokenizers["byte_level"].encode("🙂").ids[:1]) == ""
    assert detokenizer.push(tokenizers["byte_level"].encode("1").ids) == REPLACEMENT + "1"


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("bad", [-1, 49152, 2**40])
def test_a54_a_bad_id_is_an_error_and_takes_nothing(tokenizers, vocabularies, kind, bad):
    detokenizer = vocabularies[kind].detokenizer()
    good = tokenizers[kind].encode("the capital", add_special_tokens=False).ids
    with pytest.raises(EngineError, match=str(bad)):
        detokenizer.push([*good, bad])
    assert detokenizer.push(good) + detokenizer.flush() == whole(kind, tokenizers[kind], good)


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("bad", [-1, 49152, 191222, 999_999, 2**40])
def test_a44_ids_outside_the_vocabulary_are_named_however_they_come(vocabularies, kind, bad):
    detokenizer = vocabularies[kind].detokenizer()
    for take in (
        lambda: detokenizer.push([bad]),
        lambda: detokenizer.push([5, bad, 6]),
        lambda: detokenizer.push_one(bad),
        lambda: detokenizer.shown(bad),
    ):
        with pytest.raises(EngineError, match=str(bad)):
            take()
    assert detokenizer.flush() == ""


def test_ids_of_a_padded_vocabulary_have_no_text(tokenizers):
    tokenizer = tokenizers["byte_level"]
    size = Vocabulary(tokenizer).size
    detokenizer = Vocabulary(tokenizer, size + 8).detokenizer()
    assert detokenizer.push([size, size + 7]) == ""
    with pytest.raises(EngineError):
        detokenizer.push([size + 8])


@pytest.mark.parametrize("kind", FOLDERS)
def test_special_tokens_show_only_if_asked_for(tokenizers, vocabularies, kind):
    end = tokenizers[kind].token_to_id("<|im_end|>")
    the = tokenizers[kind].encode("the", add_special_tokens=False).ids
    hidden = "".join(stream(vocabularies[kind].detokenizer(), [*the, end]))
    shown = "".join(stream(vocabularies[kind].detokenizer(keep_special=True), [*the, end]))
    assert "<|im_end|>" not in hidden
    assert shown.endswith("<|im_end|>")


def test_a_sentencepiece_completion_keeps_its_first_space(tokenizers, vocabularies):
    ids = tokenizers["sentencepiece"].encode("Paris", add_special_tokens=False).ids
    assert "".join(stream(vocabularies["sentencepiece"].detokenizer(), ids)) == " Paris"


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_fork_goes_its_own_way(tokenizers, vocabularies, kind):
    ids = tokenizers[kind].encode("the capital 🙂", add_special_tokens=False).ids
    detokenizer = vocabularies[kind].detokenizer()
    first = detokenizer.push(ids[:-2])
    fork = detokenizer.fork()
    rest = detokenizer.push(ids[-2:]) + detokenizer.flush()
    assert fork.push(ids[-2:]) + fork.flush() == rest
    assert first + rest == whole(kind, tokenizers[kind], ids)


def test_a_decoder_that_never_completes_a_character_does_not_hold_text_for_ever(tokenizers):
    tokenizer = Tokenizer.from_str(tokenizers["wordpiece"].to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("the", REPLACEMENT)])
    the = tokenizer.token_to_id("the")
    detokenizer = Vocabulary(tokenizer).detokenizer()
    assert detokenizer.push([the] * MAX_HELD_TOKENS) != ""
