import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from kvmesh.errors import EngineError, InvalidRequestError
from kvmesh.testing.tokenizer_folders import (
    byte_level_folder,
    sentencepiece_folder,
    wordpiece_folder,
)
from kvmesh.types import TokenLogprob
from services.tokenizer.completion import CompletionText
from services.tokenizer.detokenize import Vocabulary
from services.tokenizer.stops import StopMatcher

repeatable = settings(deadline=None, derandomize=True)
FOLDERS = {
    "byte_level": byte_level_folder,
    "sentencepiece": sentencepiece_folder,
    "wordpiece": wordpiece_folder,
}
SPECIAL = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: Tokenizer.from_file(str(make(root / name) / "tokenizer.json"))
        for name, make in FOLDERS.items()
    }


@pytest.fixture(scope="module")
def vocabularies(tokenizers) -> dict[str, Vocabulary]:
    return {name: Vocabulary(tokenizer) for name, tokenizer in tokenizers.items()}


def rows_for(ids, top=2):
    """One row for each id, told apart by its position."""
    return [
        TokenLogprob(-float(at), tuple((id_, -float(other)) for other in range(top)), at + 1)
        for at, id_ in enumerate(ids)
    ]


def completion(vocabulary, stops=(), *, include_stop=False, min_tokens=0, keep=False):
    matcher = StopMatcher(stops, include_stop=include_stop) if stops else None
    detokenizer = vocabulary.detokenizer(keep_special=keep)
    return CompletionText(detokenizer, matcher, min_tokens=min_tokens)


def pieces_of(ids, cuts):
    """The ids in pieces that end at `cuts`, each with where it begins."""
    start = 0
    for end in sorted({min(cut, len(ids)) for cut in cuts if cut} | {len(ids)} - {0}):
        yield start, ids[start:end]
        start = end


def stream(text, ids, cuts):
    """Push in pieces, scored; return the deltas: (text, entries)."""
    scored, deltas = text.scored(), []
    for start, piece in pieces_of(ids, cuts):
        rows = rows_for(ids)[start : start + len(piece)]
        deltas.append(scored.push_scored(start, piece, rows))
        if scored.stop_string is not None:
            return deltas, scored
    return [*deltas, scored.finish_scored()], scored


def plain(text, ids, cuts):
    """Push in pieces, without log probabilities; return (text, count, stop)."""
    whole = ""
    for start, piece in pieces_of(ids, cuts):
        whole += text.push(start, piece)
        if text.stop_string is not None:
            return whole, text.token_count, text.stop_string
    return whole + text.finish(), text.token_count, text.stop_string


def outcome(vocabulary, ids, cuts, options):
    """All that comes out of a scored completion: text, entries, count, stop."""
    deltas, scored = stream(completion(vocabulary, **options), ids, cuts)
    text = "".join(text for text, _ in deltas)
    entries = [entry for _, entries in deltas for entry in entries]
    return text, entries, scored.token_count, scored.stop_string


def expected(vocabulary, ids, *, stops, include_stop, min_tokens, keep):
    """The rule, spelled out: (text, count, stop)."""
    detokenizer = vocabulary.detokenizer(keep_special=keep)
    text, early = "", 0
    for count, id_ in enumerate(ids, 1):
        # One character at a time: the first match to end wins, of two the longer.
        for char in detokenizer.push([id_]):
            text += char
            found = [stop for stop in stops if text.endswith(stop)]
            if found and count > min_tokens:
                stop = max(found, key=len)
                return text if include_stop else text[: -len(stop)], count, stop
        early = len(text) if count <= min_tokens else early
    for char in detokenizer.flush():
        text += char
        found = [stop for stop in stops if text.endswith(stop)]
        if found and len(ids) > min_tokens:
            stop = max(found, key=len)
            return text if include_stop else text[: -len(stop)], len(ids), stop
    return text, len(ids), None


words = ["the", " capital", " of", "🛑", "Paris", ", ", "\n", "삼겹살", "e\u0301", "🙂", "<"]
raw_ids = st.lists(st.integers(0, 400), max_size=20)
texts = st.lists(st.one_of(st.sampled_from(words), st.just(SPECIAL), st.text(max_size=6)))
cuts = st.lists(st.integers(0, 60), max_size=10)
options = st.fixed_dictionaries(
    {
        "stops": st.lists(
            st.sampled_from(
                ["capital", " of", "🛑", "Paris, the", "l o", "\ufffd", "e", "aa", "살"]
            ),
            max_size=3,
        ),
        "include_stop": st.booleans(),
        "min_tokens": st.integers(0, 8),
        "keep": st.booleans(),
    }
)


def ids_of(tokenizer, text, more, vocabulary):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [*ids, *[id_ % vocabulary.size for id_ in more]]


@pytest.mark.parametrize("kind", FOLDERS)
@repeatable
@given(text=texts.map("".join), more=raw_ids, cuts=cuts, options=options)
def test_nothing_depends_on_the_cuts(tokenizers, vocabularies, kind, text, more, cuts, options):
    vocabulary = vocabularies[kind]
    ids = ids_of(tokenizers[kind], text, more, vocabulary)
    streamed = outcome(vocabulary, ids, range(len(ids)), options)
    assert outcome(vocabulary, ids, cuts, options) == streamed
    assert outcome(vocabulary, ids, [], options) == streamed
    whole, _, count, stop = streamed
    for cut in (cuts, [], range(len(ids))):
        assert plain(completion(vocabulary, **options), ids, cut) == (whole, count, stop)
    assert expected(vocabulary, ids, **options) == (whole, count, stop)


@pytest.mark.parametrize("kind", FOLDERS)
@repeatable
@given(text=texts.map("".join), more=raw_ids, cuts=cuts, options=options)
def test_a57_entries_are_in_step_with_the_text(
    tokenizers, vocabularies, kind, text, more, cuts, options
):
    vocabulary = vocabularies[kind]
    ids = ids_of(tokenizers[kind], text, more, vocabulary)
    deltas, _ = stream(completion(vocabulary, **options), ids, cuts)
    whole, entries, count, stop = outcome(vocabulary, ids, cuts, options)

    # Each token once and in order, none that was not read.
    assert [entry.token.token_id for entry in entries] == ids[: len(entries)]
    assert [entry.token.logprob for entry in entries] == [-float(at) for at in range(len(entries))]
    assert [entry.rank for entry in entries] == list(range(1, len(entries) + 1))
    if stop is None:
        assert len(entries) == count == len(ids)
    assert len(entries) <= count

    # Joined bytes are the text; after a stop they may go on to the end of the last token.
    joined = b"".join(entry.token.text for entry in entries)
    if stop is None:
        assert joined.decode(errors="replace") == whole
    else:
        assert joined.decode(errors="replace").startswith(whole) or whole.endswith("\ufffd")
        last = len(entries[-1].token.text) if entries else 0
        assert len(joined) - last <= len(whole.encode())

    # Offsets: never back, and each token's text is found where it says.
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets)
    for entry in entries:
        try:
            shown = entry.token.text.decode()
        except UnicodeDecodeError:
            continue
        end = entry.offset + len(shown)
        assert whole[entry.offset : end] == shown[: max(0, len(whole) - entry.offset)]

    # With the text that a token ends in: not before it, and not after it.
    sent, told = 0, 0
    for piece, due in deltas[:-1]:
        sent += len(piece)
        told += len(due)
        assert all(end_of(entry) <= sent for entry in due)
        assert told == len(entries) or end_of(entries[told], late=True) > sent


def end_of(entry, *, late=False):
    """Where a token's text ends; of what is not whole characters, no later (or earlier)."""
    data = entry.token.text
    if not data:
        # What it shows may be to come: words that are not complete have no text yet.
        return entry.offset + late
    try:
        return entry.offset + len(data.decode())
    except UnicodeDecodeError:
        return entry.offset + (len(data) if late else 1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a57_the_reported_stream(tokenizers, vocabularies, size):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("go 🙂 XYW and XYZW more").ids
    deltas, scored = stream(
        completion(vocabularies["byte_level"], ["XYZW"]), ids, range(0, len(ids), size)
    )
    text = "".join(text for text, _ in deltas)
    entries = [entry for _, entries in deltas for entry in entries]
    assert text == "go 🙂 XYW and "
    assert scored.stop_string == "XYZW"
    assert b"".join(entry.token.text for entry in entries).decode().startswith(text)
    assert [entry.token.token_id for entry in entries] == ids[: len(entries)]
    assert tokenizer.decode(ids[: scored.token_count]).endswith("XYZW")
    # A character in pieces: every piece says where the whole one is.
    parts = [entry for entry in entries if entry.token.text in "🙂".encode()]
    assert {entry.offset for entry in parts} == {3}
    assert b"".join(entry.token.text for entry in parts) == "🙂".encode()


def test_a57_entries_of_held_back_text_come_with_it(tokenizers, vocabularies):
    ids = [tokenizers["byte_level"].encode(char).ids[0] for char in "aXYb"]
    text = completion(vocabularies["byte_level"], ["XYZ"]).scored()
    deltas = [text.push_scored(at, [id_], rows_for([id_])) for at, id_ in enumerate(ids)]
    assert [(piece, len(entries)) for piece, entries in deltas] == [
        ("a", 1),
        ("", 0),
        ("", 0),
        ("XYb", 3),
    ]


def test_a57_a_token_that_begins_in_what_is_sent_is_told_whole(tokenizers, vocabularies):
    ids = [tokenizers["byte_level"].token_to_id("he")]
    cut = outcome(vocabularies["byte_level"], ids, [], {"stops": ["e"]})
    assert (cut[0], cut[2:]) == ("h", (1, "e"))
    assert [entry.token.text for entry in cut[1]] == [b"he"]
    assert outcome(vocabularies["byte_level"], ids, [], {"stops": ["h"]}) == ("", [], 1, "h")


@pytest.mark.parametrize("kind", FOLDERS)
def test_hidden_tokens_have_entries_without_text_but_show_as_alternatives(
    tokenizers, vocabularies, kind
):
    end = tokenizers[kind].token_to_id(SPECIAL)
    ids = [*tokenizers[kind].encode("the", add_special_tokens=False).ids, end]
    text = completion(vocabularies[kind]).scored()
    text.push_scored(0, ids[:-1], rows_for(ids[:-1]))
    piece, entries = text.push_scored(len(ids) - 1, [end], [TokenLogprob(-1.0, ((end, -1.0),))])
    assert piece == ""
    (entry,) = entries
    assert entry.token.text == b""
    assert entry.top[0].text.strip() == SPECIAL.encode()


def test_a_sentencepiece_token_keeps_its_space_and_bytes_are_tokens(tokenizers, vocabularies):
    ids = tokenizers["sentencepiece"].encode("the 🙂", add_special_tokens=False).ids
    _, entries, _, _ = outcome(vocabularies["sentencepiece"], ids, range(9), {})
    assert entries[0].token.text.startswith(b" ")
    assert [entry.token.text for entry in entries[-4:]] == [bytes([b]) for b in "🙂".encode()]
    assert len({entry.offset for entry in entries[-4:]}) == 1


def test_a_character_that_breaks_off_counts_as_one(tokenizers, vocabularies):
    tokenizer = tokenizers["byte_level"]
    ids = [tokenizer.encode("🙂").ids[0], *tokenizer.encode("1").ids]
    text, entries, _, _ = outcome(vocabularies["byte_level"], ids, [], {})
    assert text == "\ufffd1"
    assert [entry.offset for entry in entries] == [0, 1]


def test_alternatives_of_a_word_tokenizer_show_as_they_would_here(tokenizers, vocabularies):
    tokenizer = tokenizers["wordpiece"]
    the, of = tokenizer.token_to_id("the"), tokenizer.token_to_id("of")
    text = completion(vocabularies["wordpiece"]).scored()
    text.push_scored(0, [the], [TokenLogprob(-1.0)])
    _, entries = text.push_scored(1, [of], [TokenLogprob(-1.0, ((of, -1.0), (the, -2.0)))])
    assert entries[0].token.text == b" of"
    assert [score.text for score in entries[0].top] == [b" of", b" the"]


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_a54_a_bad_alternative_is_an_error(tokenizers, vocabularies, kind, bad):
    text = completion(vocabularies[kind]).scored()
    with pytest.raises(EngineError, match=str(bad)):
        text.push_scored(0, [5], [TokenLogprob(-1.0, ((bad, -1.0),))])


def test_rows_that_do_not_fit_their_tokens_are_refused(vocabularies):
    text = completion(vocabularies["byte_level"]).scored()
    with pytest.raises(InvalidRequestError) as caught:
        text.push_scored(0, [5, 6], [TokenLogprob(-1.0)])
    assert caught.value.field == "logprobs"
    with pytest.raises(InvalidRequestError) as caught:
        text.push_scored(1, [5], [TokenLogprob(-1.0)])
    assert caught.value.field == "offset"


def test_a_stop_string_within_the_first_tokens_is_text(tokenizers, vocabularies):
    ids = [tokenizers["byte_level"].encode(char).ids[0] for char in "abab"]
    vocabulary = vocabularies["byte_level"]
    for min_tokens, outcome_ in ((0, ("", 2)), (1, ("", 2)), (2, ("ab", 4)), (3, ("ab", 4))):
        text = completion(vocabulary, ["ab"], min_tokens=min_tokens)
        assert plain(text, ids, [])[:2] == outcome_
    assert plain(completion(vocabulary, ["ab"], min_tokens=4), ids, [1]) == ("abab", 4, None)


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2]])
def test_a_hidden_token_just_before_the_stop_string_has_its_entry(tokenizers, vocabularies, cuts):
    tokenizer = tokenizers["byte_level"]
    hidden = tokenizer.token_to_id(SPECIAL)
    ids = [tokenizer.token_to_id("a"), hidden, tokenizer.token_to_id("b"), hidden]
    text, entries, count, _ = outcome(vocabularies["byte_level"], ids, cuts, {"stops": ["b"]})
    assert (text, count) == ("a", 3)
    assert [(entry.token.token_id, entry.offset) for entry in entries] == [(ids[0], 0), (hidden, 1)]


def test_what_a_window_still_holds_belongs_to_the_last_token(tokenizers):
    tokenizer = Tokenizer.from_str(tokenizers["wordpiece"].to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("the", "\ufffd")])
    the = tokenizer.token_to_id("the")
    text, entries, _, _ = outcome(Vocabulary(tokenizer), [the, the], [1], {})
    assert text == "\ufffd\ufffd"
    assert [entry.token.text.decode() for entry in entries] == ["", text]
