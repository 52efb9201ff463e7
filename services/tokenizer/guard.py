"""Special tokens that users type stay text.

A chat template writes control tokens such as `<|im_start|>` as text among the texts of
the messages. `Guard` tells the two apart: it marks what reads like a special token in
the messages, tools and variables before they are rendered, and afterwards takes the
rendered text apart into the template's own special tokens and plain text with the marks
removed.

Marks are secret random strings of private-use characters, so that no message can
contain them; they pass through trimming, changes of case and JSON. Conversations without
anything that looks special are left as they are, which is nearly all of them.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from tokenizers import AddedToken

from services.tokenizer.conversation import Conversation


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
        # Without one of these, no text has a special token, nor a part that could be joined.
        self._hint = _any_of(sorted({re.escape(text[end]) for text in contents for end in (0, -1)}))
        written = _any_of([_as_matched(token) for token in tokens])
        self._written = re.compile(f"(?<!{self._mark})(?:{written.pattern})")

    def mark(self, conversation: Conversation) -> Conversation:
        """Return the conversation with marks; the very same one if nothing looks special.

        Every string in it is marked, keys too; only the names of variables are not, which
        no template can write out.
        """
        messages = self._mark_value(conversation.messages)
        tools = self._mark_value(conversation.tools)
        variables = {
            name: self._mark_value(value) for name, value in conversation.variables.items()
        }
        same = (
            messages is conversation.messages
            and tools is conversation.tools
            and all(value is conversation.variables[name] for name, value in variables.items())
        )
        return conversation if same else Conversation(messages, tools, variables)

    def take_apart(self, rendered: str) -> Taken:
        """Separate the template's special tokens from the text of a marked conversation."""
        specials: list[str] = []

        def separate(match: re.Match[str]) -> str:
            specials.append(match[match.lastindex or 0])
            return self.separator

        text = self._written.sub(separate, rendered)
        for secret in (self._mark, self._edge):
            # A template may write JSON with all but ASCII escaped.
            text = text.replace(secret, "").replace(_escaped(secret), "")
        return Taken(text, specials)

    def _mark_value(self, value: Any) -> Any:
        """Return a JSON value with every string marked; the very same one if none needs it."""
        if isinstance(value, str):
            if self._hint.search(value) is None:  # nearly always
                return value
            return self._mark_ends(self._mark_specials(value))
        if isinstance(value, list):
            items = [self._mark_value(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else items
        if isinstance(value, dict):
            pairs = [(self._mark_value(key), self._mark_value(item)) for key, item in value.items()]
            same = all(
                key is old_key and item is old_item
                for (key, item), (old_key, old_item) in zip(pairs, value.items(), strict=True)
            )
            return value if same else dict(pairs)
        return value

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


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


def _as_matched(token: AddedToken) -> str:
    """Return what the tokenizer takes in for `token`; its content is a group."""
    word = (r"(?<!\w)", r"(?!\w)") if token.single_word else ("", "")
    left = r"\s*" if token.lstrip else ""
    right = r"\s*" if token.rstrip else ""
    return f"{left}{word[0]}({re.escape(token.content)}){word[1]}{right}"
