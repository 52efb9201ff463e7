"""What a chat template sees of a conversation. Pure.

Tools, further variables and further fields of messages are the caller's own JSON: they
are read here, once, and go into the template as they were written, integers as integers
and keys in their order.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatMessage, ChatPrompt

MAX_JSON_DEPTH = 64
"""How deep a caller's JSON may be nested: templates walk it with recursive macros."""

TOOLS_FIELD = "tools"
VARIABLES_FIELD = "chat_template_kwargs"
MESSAGES_FIELD = "messages"

_OWN_FIELDS = ("role", "content", "name")
"""Fields of a message that are not for its `extra` to say."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, tools and further variables as JSON values, at most `MAX_JSON_DEPTH` deep."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


def conversation(chat: ChatPrompt) -> Conversation:
    """Read a conversation's JSON.

    Raises `InvalidRequestError` for what is not JSON, not what it should be, nested too
    deeply or not text (halves of surrogates), naming `tools`, `chat_template_kwargs` or
    `messages`.
    """
    return Conversation(
        [_message(message) for message in chat.messages],
        _tools(chat.tools),
        _variables(chat.template_kwargs),
    )


def conversation_size(chat: ChatPrompt) -> int:
    """Return how many characters a conversation has, JSON and template included."""
    others = len(chat.tools) + len(chat.template_kwargs) + len(chat.template)
    return others + sum(
        len(turn.role) + len(turn.content) + len(turn.name) + len(turn.extra)
        for turn in chat.messages
    )


def _message(message: ChatMessage) -> dict[str, Any]:
    seen: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        seen["name"] = message.name
    if message.extra:
        extra = _read(message.extra, MESSAGES_FIELD)
        if not isinstance(extra, dict):
            raise _refused(MESSAGES_FIELD, "further fields of a message must be an object")
        clash = next((name for name in _OWN_FIELDS if name in extra), None)
        if clash is not None:
            raise _refused(MESSAGES_FIELD, f"a message says its {clash} twice")
        # Templates would print a null as the word None.
        seen |= {name: value for name, value in extra.items() if value is not None}
        _settle_tool_calls(seen)
    return seen


def _settle_tool_calls(message: dict[str, Any]) -> None:
    """Make arguments objects, as templates expect them; drop an empty list of calls."""
    calls = message.get("tool_calls")
    if calls == []:
        del message["tool_calls"]
    if not isinstance(calls, list):
        return
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _arguments(function["arguments"])


def _arguments(value: Any) -> Any:
    """Return what a call's arguments are: text stays text unless it is a JSON object."""
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        return value
    try:
        loaded = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if not isinstance(loaded, dict):
        return value
    _check(loaded, MESSAGES_FIELD)
    return loaded


def _tools(text: str) -> list[dict[str, Any]] | None:
    if not text:
        return None
    return _objects(_read(text, TOOLS_FIELD), TOOLS_FIELD, TOOLS_FIELD)


def _variables(text: str) -> dict[str, Any]:
    if not text:
        return {}
    variables = _read(text, VARIABLES_FIELD)
    if not isinstance(variables, dict):
        raise _refused(VARIABLES_FIELD, f"{VARIABLES_FIELD} must be a JSON object")
    if variables.get("documents") is not None:
        _objects(variables["documents"], "documents", VARIABLES_FIELD)
    return variables


def _objects(value: Any, name: str, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _refused(field, f"{name} must be an array of JSON objects")
    return value


def _read(text: str, field: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise _too_deep(field) from None
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos}"
        raise _refused(field, f"{field} is not JSON: {where}") from error
    except ValueError as error:  # NaN and the like, integers of thousands of digits
        raise _refused(field, f"{field} has a number that is out of range") from error
    _check(value, field)
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _check(value: Any, field: str) -> None:
    """Refuse what is too deep, no text, or not to be written as JSON again."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise _too_deep(field)
        inner: list[Any] = []
        for item in level:
            inner.extend(_inside(item))
            if isinstance(item, str) and not _is_text(item):
                raise _refused(field, f"{field} has half of a surrogate pair in a string")
            if isinstance(item, float) and not math.isfinite(item):
                raise _refused(field, f"{field} has a number that is out of range")
        level = inner


def _inside(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    return item if isinstance(item, list) else ()


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(field: str) -> InvalidRequestError:
    return _refused(field, f"{field} is nested more than {MAX_JSON_DEPTH} deep")


def _refused(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field=field)
