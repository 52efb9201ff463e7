"""Special tokens that users type stay text.

A chat template writes control tokens such as `<|im_start|>` as text among the texts of
the messages. `Guard` tells the two apart: it marks what reads like a special token in
the messages before they are rendered, and afterwards takes the rendered text apart
into the template's own special tokens and plain text with the marks removed.

Marks are secret random strings of private-use characters, so that no message can
contain them; they pass through trimming and changes of case. Messages without anything
that looks special are left as they are, which is nearly all of them.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import uuid4

from tokenizers import AddedToken

from kvmesh.types import ChatMessage, ChatPrompt


class Taken(NamedTuple):
    """A rendered prompt taken apart.

    `text` is all of it, with `Guard.separator` in place of each special token that the
    template wrote; `specials` are those, in order.
    """

    text: str
    specials: list[str]


class Guard:
    """Knows the special tokens of one tokenizer.

    Only tokens that the tokenizer calls special are guarded: those that control the
    model. Other added tokens, such as `<tool_call>`, are ordinary text that happens to
    have its own id.
    """

    def __init__(self, specials: Sequence[AddedToken]) -> None:
        """Take the special tokens, which may be none."""
        tokens = sorted(specials, key=lambda token: len(token.content), reverse=True)
        contents = [token.content for token in tokens]
        self.separator = _secret()
        self._mark = _secret()
        self._edge = _secret()
        self._heads = {text[:size] for text in contents for size in range(1, len(text))}
        self._tails = {text[size:] for text in contents for size in range(1, len(text))}
        self._reach = max(map(len, contents), default=0)
        self._typed = _any_of([re.escape(text) for text in contents])
        written = _any_of([_as_matched(token) for token in tokens])
        self._written = re.compile(f"(?<!{self._mark})(?:{written.pattern})")

    def mark(self, chat: ChatPrompt) -> ChatPrompt:
        """Return the conversation with marks; the very same one if nothing looks special."""
        marked = tuple(self._mark_message(message) for message in chat.messages)
        if all(new is old for new, old in zip(marked, chat.messages, strict=True)):
            return chat
        return replace(chat, messages=marked)

    def take_apart(self, rendered: str) -> Taken:
        """Separate the template's special tokens from the text of a marked conversation."""
        specials: list[str] = []

        def separate(match: re.Match[str]) -> str:
            specials.append(match[match.lastindex or 0])
            return self.separator

        text = self._written.sub(separate, rendered)
        return Taken(text.replace(self._mark, "").replace(self._edge, ""), specials)

    def _mark_message(self, message: ChatMessage) -> ChatMessage:
        role = self._mark_specials(message.role)
        name = self._mark_specials(message.name)
        content = self._mark_ends(self._mark_specials(message.content))
        if (role, name, content) == (message.role, message.name, message.content):
            return message
        return ChatMessage(role, content, name)

    def _mark_specials(self, text: str) -> str:
        """Put marks before and inside everything in `text` that reads as a special token."""
        return self._typed.sub(lambda match: self._broken(match[0]), text)

    def _broken(self, special: str) -> str:
        return self._mark + special[0] + self._mark + special[1:]

    def _mark_ends(self, text: str) -> str:
        """Keep a special token from forming across texts that the template joins.

        White space around the text is passed over: templates trim.
        """
        body = text.strip()
        start = len(text) - len(text.lstrip())
        end = start + len(body)
        sizes = range(1, min(self._reach, len(body) + 1))
        before = self._edge if any(body[:size] in self._tails for size in sizes) else ""
        after = self._edge if any(body[-size:] in self._heads for size in sizes) else ""
        if not before and not after:
            return text
        return text[:start] + before + body + after + text[end:]


def _secret() -> str:
    """Return a new text that nobody can guess, of private-use characters."""
    return "".join(chr(0xE000 + byte) for byte in uuid4().bytes)


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


def _as_matched(token: AddedToken) -> str:
    """Return what the tokenizer takes in for `token`; its content is a group."""
    word = (r"(?<!\w)", r"(?!\w)") if token.single_word else ("", "")
    left = r"\s*" if token.lstrip else ""
    right = r"\s*" if token.rstrip else ""
    return f"{left}{word[0]}({re.escape(token.content)}){word[1]}{right}"
