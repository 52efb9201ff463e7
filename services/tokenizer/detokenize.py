"""Token ids into text, as they come.

A `Vocabulary` is made once for a tokenizer; it makes a `Detokenizer` for each
completion. The text is what continues a prompt: a tokenizer that drops the first
space of a whole text (SentencePiece's) keeps it here.

Byte-level and SentencePiece-like vocabularies, which is nearly all, go through a
table from id to bytes and one UTF-8 decoder: exact and of constant cost for any ids.
(With byte fallback, `tokenizers` itself turns a whole run of bytes into U+FFFDs when any
of it is broken; here only what is broken becomes one, since the rest was sent before.)
For other tokenizers a short window of tokens is decoded again and again.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from kvmesh.errors import EngineError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MAX_HELD_TOKENS = 8
"""Tokens that may wait for the rest of a character: none has more than four bytes."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenText(NamedTuple):
    """What one token does to the text.

    `text` is what it completes, as `push` returns it; `data` its own text in UTF-8, perhaps
    a part of a character, empty where the text does not show it. Its own text begins
    `begins` characters after what was returned before: not 0 where a character that was
    waited for breaks off. `waits`: the last of it is not returned yet.
    """

    text: str
    data: bytes
    begins: int
    waits: bool


class Detokenizer(Protocol):
    """Turns the tokens of one completion into text.

    The pieces that `push` and the final `flush` return make up the whole text, however
    the tokens were cut into pushes. Only whole characters are returned.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text they complete, perhaps empty.

        Raises `EngineError` for an id outside the vocabulary; nothing is taken then.
        """
        ...

    def flush(self) -> str:
        """Return what is left: U+FFFD for a character that will not be completed."""
        ...

    def fork(self) -> "Detokenizer":
        """Return an independent copy in the same state."""
        ...

    def push_one(self, id_: int) -> TokenText:
        """Take one token as `push` does, and tell how it shows: for log probabilities."""
        ...

    def shown(self, id_: int) -> bytes:
        """Return a token's text if it came next, in UTF-8; special tokens show here.

        Raises `EngineError` for an id outside the vocabulary.
        """
        ...


class Vocabulary:
    """What the tokens of one tokenizer look like as text."""

    def __init__(self, tokenizer: Tokenizer, size: int = 0) -> None:
        """Prepare the tables. `size`: ids below it are known even without a token, as
        models have that pad their vocabulary; such an id has no text.
        """
        tokens = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(size, 1 + max(tokens.values(), default=-1))
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._tables: dict[bool, Sequence[str | bytes]] | None = None
        decoder = tokenizer.decoder
        encode = _token_encoder(json.loads(decoder.__getstate__()) if decoder else None)
        if encode is not None:
            shown: list[str | bytes] = [""] * self.size
            for token, id_ in tokens.items():
                shown[id_] = _text_if_whole(encode(token))
            hidden = list(shown)
            for id_ in self._special:
                hidden[id_] = ""
            self._tables = {True: shown, False: hidden}

    def detokenizer(self, *, keep_special: bool = False) -> Detokenizer:
        """Return a detokenizer for one completion.

        `keep_special`: special tokens show in the text.
        """
        if self._tables is not None:
            return _TableDetokenizer(self._tables[keep_special], self._tables[True])
        skipped = frozenset() if keep_special else self._special
        return _WindowDetokenizer(self._tokenizer, self.size, skipped)


class _TableDetokenizer:
    """Looks up each token and decodes its bytes as UTF-8.

    A token of whole characters is in the table as text, any other as bytes: most tokens
    need no decoding at all.
    """

    __slots__ = ("_all", "_pending", "_table")

    def __init__(
        self, table: Sequence[str | bytes], all_: Sequence[str | bytes], pending: bytes = b""
    ) -> None:
        self._table = table
        self._all = all_
        self._pending = pending

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:  # nearly always
            id_ = token_ids[0]
            if not 0 <= id_ < len(table):
                raise _unknown_token(token_ids, len(table))
            entry = table[id_]
            if isinstance(entry, str) and not self._pending:
                return entry
            return self._decode([entry])
        if not token_ids:
            return ""
        if min(token_ids) < 0 or max(token_ids) >= len(table):
            raise _unknown_token(token_ids, len(table))
        return self._decode([table[id_] for id_ in token_ids])

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def fork(self) -> "_TableDetokenizer":
        return _TableDetokenizer(self._table, self._all, self._pending)

    def push_one(self, id_: int) -> TokenText:
        pending = self._pending
        text = self.push((id_,))
        data = _as_bytes(self._table[id_])
        begins = _broken_off(pending, data) if pending and data else 0
        return TokenText(text, data, begins, waits=bool(data and self._pending))

    def shown(self, id_: int) -> bytes:
        if not 0 <= id_ < len(self._all):
            raise _unknown_token((id_,), len(self._all))
        return _as_bytes(self._all[id_])

    def _decode(self, entries: Sequence[str | bytes]) -> str:
        if not self._pending and bytes not in set(map(type, entries)):
            return "".join(entries)  # type: ignore[arg-type]
        data = self._pending + b"".join(
            [entry.encode() if isinstance(entry, str) else entry for entry in entries]
        )
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text


class _WindowDetokenizer:
    """Decodes the tokens since the last text but one, and takes what is new.

    `_ids[:_read]` is context whose text was returned before, `_prefix` its text.
    """

    __slots__ = ("_ids", "_prefix", "_read", "_size", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, size: int, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._skipped = skipped
        self._ids: list[int] = []
        self._read = 0
        self._prefix = ""

    def push(self, token_ids: Sequence[int]) -> str:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._size):
            raise _unknown_token(token_ids, self._size)
        return "".join([self._step(id_) for id_ in token_ids if id_ not in self._skipped])

    def flush(self) -> str:
        text = self._decode()[len(self._prefix) :]
        self._ids, self._read, self._prefix = [], 0, ""
        return text

    def fork(self) -> "_WindowDetokenizer":
        copy = _WindowDetokenizer(self._tokenizer, self._size, self._skipped)
        copy._ids, copy._read, copy._prefix = list(self._ids), self._read, self._prefix
        return copy

    def push_one(self, id_: int) -> TokenText:
        text = self.push((id_,))
        return TokenText(text, text.encode(), 0, waits=not text and id_ not in self._skipped)

    def shown(self, id_: int) -> bytes:
        if not 0 <= id_ < self._size:
            raise _unknown_token((id_,), self._size)
        text = self._tokenizer.decode([*self._ids, id_], skip_special_tokens=False)
        return text[len(self._prefix) :].encode()

    def _step(self, id_: int) -> str:
        self._ids.append(id_)
        text = self._decode()
        waits = len(self._ids) - self._read < MAX_HELD_TOKENS
        if waits and (len(text) <= len(self._prefix) or text.endswith(REPLACEMENT)):
            return ""
        delta = text[len(self._prefix) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._prefix = self._decode()
        return delta

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)


def _text_if_whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _as_bytes(entry: str | bytes) -> bytes:
    return entry.encode() if isinstance(entry, str) else entry


def _broken_off(pending: bytes, data: bytes) -> int:
    """Return how many U+FFFD `pending` becomes where `data` does not complete it; else 0.

    It is one but for halves of surrogates, whose bytes count one by one.
    """
    try:
        codecs.utf_8_decode(pending + data[:1], "strict", False)
    except UnicodeDecodeError:
        return len(pending.decode(errors="replace"))
    return 0


def _unknown_token(token_ids: Sequence[int], size: int) -> EngineError:
    bad = next(id_ for id_ in token_ids if not 0 <= id_ < size)
    return EngineError(f"the engine sent token {bad}, outside its vocabulary of {size}")


def _token_encoder(decoder: dict[str, Any] | None) -> "_TokenEncoder | None":
    """Return how one token becomes bytes, if the tokenizer's decoder allows it."""
    parts = _flatten(decoder) if decoder else []
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if not kinds or kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    marks = [_space_mark(part) for part in parts if part["type"] in {"Replace", "Metaspace"}]
    strips = [part for part in parts if part["type"] == "Strip"]
    if len(marks) != 1 or not marks[0] or any(part["stop"] for part in strips):
        return None
    return _SentencePiece(marks[0], byte_fallback="ByteFallback" in kinds)


class _TokenEncoder(Protocol):
    def __call__(self, token: str, /) -> bytes: ...


class _SentencePiece:
    """Tokens with a mark for the space, and perhaps `<0x0A>` for a byte."""

    def __init__(self, mark: str, *, byte_fallback: bool) -> None:
        self._mark = mark
        self._byte_fallback = byte_fallback

    def __call__(self, token: str, /) -> bytes:
        if self._byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match[1])
        return token.replace(self._mark, " ").encode()


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flatten(inner)]


def _space_mark(part: dict[str, Any]) -> str:
    """Return the mark that the decoder turns into a space, empty if it does other things."""
    if part["type"] == "Metaspace":
        return str(part["replacement"])
    mark = part["pattern"].get("String", "")
    return str(mark) if part["content"] == " " and mark == _SPACE_MARK else ""


def _byte_level(token: str, /) -> bytes:
    """Return the bytes that a byte-level token stands for; others stand for themselves."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, the rest start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()
