"""Conversations as OpenAI's API has them, read into prompts for the chat template."""

from collections.abc import Mapping
from typing import Any

import orjson

from kvmesh.types import ChatMessage, ChatPrompt
from services.frontend.rest.body import Body, items, members
from services.frontend.rest.fields import Fields, invalid, is_list_of, wrong
from services.frontend.rest.request_fields import MESSAGE, PART

_MESSAGE = Fields(MESSAGE)
_PART = Fields(PART)

_PASSED_ON = ("tool_calls", "tool_call_id", "reasoning", "reasoning_content")
"""Fields of a message that say something to the template alone."""


def read_chat(body: Body, values: Mapping[str, Any], max_messages: int) -> ChatPrompt:
    """Return the conversation in a body, of which `values` are the checked fields."""
    given = values["messages"]
    if len(given) > max_messages:
        raise invalid("messages", f"may be at most {max_messages}, got {len(given)}")
    goes_on, opens = values["continue_final_message"], values["add_generation_prompt"]
    if goes_on and opens:
        raise invalid("continue_final_message", "and add_generation_prompt can't both be true")
    return ChatPrompt(
        _messages(body, given),
        add_generation_prompt=not goes_on if opens is None else opens,
        continue_final_message=goes_on,
        tools=body.written("tools") if _tools(values) else "",
        template_kwargs=_written_object(body, values, "chat_template_kwargs"),
        template=values["chat_template"] or "",
        add_special_tokens=values["add_special_tokens"],
    )


def _messages(body: Body, given: list[Any]) -> tuple[ChatMessage, ...]:
    read = [_message(item, f"messages[{at}]") for at, item in enumerate(given)]
    if not any(_extras(item) for item in given):
        return tuple(read)
    texts = items(body.written("messages"))
    return tuple(
        ChatMessage(one.role, one.content, one.name, _extra(text, _extras(item)))
        for one, item, text in zip(read, given, texts, strict=True)
    )


def _message(value: object, path: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    # What answers have, and has nothing in it, may come back in a history.
    kept = {name: part for name, part in value.items() if part != [] or name == "content"}
    values = _MESSAGE.read(kept, f"{path}.")
    role = values["role"]
    if "content" not in value and role != "assistant":
        raise invalid(f"{path}.content", "is required")
    if values["tool_calls"] is not None and not is_list_of(values["tool_calls"], dict):
        raise invalid(f"{path}.tool_calls", "must be an array of objects")
    # Chat templates know of no developers, and OpenAI's mean the same by it.
    known = "system" if role == "developer" else role
    return ChatMessage(known, _content(values["content"], path), values["name"] or "")


def _content(value: Any, path: str) -> str:
    """Return a message's text: parts are joined, null is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    return "".join([_part(part, f"{path}.content[{at}]") for at, part in enumerate(value)])


def _part(value: object, path: str) -> str:
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    if value.get("type") != "text":
        raise invalid(path, "is not supported: only parts of type 'text' are")
    text: str = _PART.read(value, f"{path}.")["text"]
    return text


def _extras(message: Mapping[str, Any]) -> list[str]:
    return [name for name in _PASSED_ON if message.get(name) not in (None, [])]


def _extra(written: str, names: list[str]) -> str:
    """Return the fields that are passed on as a JSON object, as they were written."""
    if not names:
        return ""
    found = members(written)
    pairs = [f"{orjson.dumps(name).decode()}:{found[name]}" for name in names]
    return f"{{{','.join(pairs)}}}"


def _tools(values: Mapping[str, Any]) -> bool:
    tools = values["tools"]
    if not tools:
        return False
    if values.get("tool_choice") is None and "tool_choice" in values:
        raise invalid(
            "tools",
            'can only be shown to the model, with a tool_choice of "none": '
            "calling tools is not supported",
        )
    if not is_list_of(tools, dict):
        raise invalid("tools", "must be an array of objects")
    return True


def _written_object(body: Body, values: Mapping[str, Any], name: str) -> str:
    return body.written(name) if values[name] else ""
