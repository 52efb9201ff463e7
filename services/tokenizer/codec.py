"""Text, conversations and token ids into a prompt's token ids, for one model folder."""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import assert_never

from tokenizers import AddedToken, Tokenizer

from kvmesh.config import ConfigError
from kvmesh.errors import InvalidRequestError, RequestTooLargeError
from kvmesh.sampling import check_bad_words
from kvmesh.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.tokenizer.chat import Render, load_json, load_templates
from services.tokenizer.conversation import conversation, conversation_size
from services.tokenizer.detokenize import Detokenizer, Vocabulary
from services.tokenizer.guard import Guard

MAX_PROMPT_CHARS = 2_000_000
"""Default bound on a prompt's text: about half a second of encoding on one core."""


class Codec:
    """Encodes prompts and makes detokenizers. Safe to use from several threads.

    Special tokens: in a raw text prompt they are recognised, since people write chat
    templates out by hand there (vLLM does the same). In a conversation only the model's
    chat template writes special tokens: what messages, tools and template variables
    contain is text, whatever it looks like. For conversations without such look-alikes the
    ids are exactly those of transformers' `apply_chat_template`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_prompt_chars: int = MAX_PROMPT_CHARS,
        render_foreign: Render | None = None,
    ) -> None:
        """Load `tokenizer.json`, the chat template and the size of the vocabulary.

        `render_foreign` renders chat templates that requests bring along; None: they may
        not.

        Raises `ConfigError` for a file that is missing, or not what it should be;
        `tokenizers` raises a plain Exception for a `tokenizer.json` that it can't read.
        """
        self._tokenizer = _load_tokenizer(folder)
        self._templates = load_templates(folder, render_foreign)
        self._max_prompt_chars = max_prompt_chars
        added = self._tokenizer.get_added_tokens_decoder().values()
        specials = [token for token in added if token.special and token.content]
        self._guard = Guard(specials)
        # Such a token would be found in text that only becomes it by normalization.
        self._always_guard = self._tokenizer.normalizer is not None and any(
            token.normalized for token in specials
        )
        self._guarded: _GuardedTokenizer | None = None
        self._guarded_lock = Lock()
        model_vocab_size = _vocab_size(folder)
        self._vocabulary = Vocabulary(self._tokenizer, model_vocab_size)
        self.vocab_size = model_vocab_size or self._vocabulary.size
        """Token ids of prompts are below it: the model's own figure where it has one."""

    def encode(self, prompt: Prompt, *, truncate_to: int = 0) -> list[int]:
        """Return the prompt's token ids, at least one. Blocks; releases the GIL meanwhile.

        `truncate_to` keeps so many of them, the last ones; 0 keeps all. The limit on a
        prompt's text is on the whole of it.

        Raises `InvalidRequestError` for what has no tokens, for ids outside the vocabulary,
        for what the chat template refuses or where there is none, and for JSON that is
        none; `RequestTooLargeError` past the limit.
        """
        match prompt:
            case TextPrompt(text, add_special_tokens):
                self._check_length(len(text), "prompt")
                ids = _ids(self._tokenizer, text, add_special_tokens=add_special_tokens)
                field = "prompt"
            case ChatPrompt():
                ids, field = self._encode_chat(prompt), "messages"
            case TokenPrompt(token_ids):
                ids, field = self._checked(token_ids), "prompt"
            case _:
                assert_never(prompt)
        if not ids:
            raise InvalidRequestError("the prompt is empty: it has no tokens", field=field)
        return ids[-truncate_to:] if truncate_to else ids

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that stand for words which a text must not have.

        As vLLM has it: each word as it is at the beginning of a text, and behind a space
        where that begins with another token and has as many. No sequence is empty.
        Raises `InvalidRequestError` for a word without tokens, and for too many of them.
        """
        found: list[list[int]] = []
        for word in dict.fromkeys(words):
            bare, spaced = (
                _ids(self._tokenizer, prefix + word.lstrip(), add_special_tokens=False)
                for prefix in ("", " ")
            )
            if not bare:
                raise InvalidRequestError("a word has no tokens", field="bad_words")
            found.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        check_bad_words(found)
        return found

    def detokenizer(self, *, keep_special: bool = False) -> Detokenizer:
        """Return a detokenizer for one completion."""
        return self._vocabulary.detokenizer(keep_special=keep_special)

    def _encode_chat(self, chat: ChatPrompt) -> list[int]:
        if not chat.messages:
            raise InvalidRequestError("a conversation needs a message", field="messages")
        self._check_length(conversation_size(chat), "messages")
        given = conversation(chat)
        marked = self._guard.mark(given)
        rendered = self._templates.render(chat, marked)
        self._check_length(len(rendered), "messages")
        add_special_tokens = chat.add_special_tokens
        if marked is given and not self._always_guard:
            return _ids(self._tokenizer, rendered, add_special_tokens=add_special_tokens)
        guarded = self._guarded_tokenizer()
        return guarded.encode(rendered, add_special_tokens=add_special_tokens)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        for position, id_ in enumerate(token_ids):
            if not 0 <= id_ < self.vocab_size:
                raise InvalidRequestError(
                    f"token id {id_} at position {position} is outside the vocabulary of "
                    f"{self.vocab_size}",
                    field="prompt",
                )
        return list(token_ids)

    def _check_length(self, length: int, field: str) -> None:
        if length > self._max_prompt_chars:
            raise RequestTooLargeError(
                f"the prompt has {length} characters; at most {self._max_prompt_chars} are taken",
                field=field,
            )

    def _guarded_tokenizer(self) -> "_GuardedTokenizer":
        """Return the tokenizer for marked text, made when it is first needed: it is as big
        as the other one.
        """
        with self._guarded_lock:
            if self._guarded is None:
                self._guarded = _GuardedTokenizer(self._tokenizer, self._guard)
            return self._guarded


class _GuardedTokenizer:
    """Encodes a marked prompt: only special tokens that the template wrote become ids.

    They are put in by way of one added token that stands for each of them, so that the
    text around them is split, normalized and merged as always.
    """

    def __init__(self, tokenizer: Tokenizer, guard: Guard) -> None:
        self._guard = guard
        added = tokenizer.get_added_tokens_decoder()
        self._vocabulary = {token.content: id_ for id_, token in added.items()}
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens([AddedToken(guard.separator, normalized=False, special=False)])
        self._separator = self._tokenizer.token_to_id(guard.separator)

    def encode(self, rendered: str, *, add_special_tokens: bool) -> list[int]:
        text, specials = self._guard.take_apart(rendered)
        written = iter(specials)
        return [
            self._vocabulary[next(written)] if id_ == self._separator else id_
            for id_ in _ids(self._tokenizer, text, add_special_tokens=add_special_tokens)
        ]


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode without offsets, which nobody reads: a fifth less work than `encode`."""
    encoded = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoded[0].ids)


def _load_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model.path: {file}: {error.strerror}") from error
    tokenizer = Tokenizer.from_str(text)
    # The file may ask for either, for the sake of training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _vocab_size(folder: Path) -> int:
    """Return the model's own vocabulary size, 0 where `config.json` does not say."""
    config = load_json(folder / "config.json")
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else 0
