"""OpenAI's request bodies, read into `Request`s. What can't be honoured is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatMessage, ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from services.frontend.request import Request
from services.frontend.rest.fields import Fields, Object, is_list_of, json_type

MAX_TOKEN_ID = 2**32 - 1

DEFAULT_COMPLETION_TOKENS = 16
"""What `/v1/completions` generates when nothing is said: OpenAI's default."""

_FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

_COMMON = frozenset(
    {
        *("model", "stream", "stream_options", "stop", "max_tokens", "min_tokens"),
        *(*_FLOATS, "top_k", "seed", "stop_token_ids", "ignore_eos"),
        *("include_stop_str_in_output", "skip_special_tokens", "priority"),
    }
)
_CHAT = _COMMON | {"messages", "max_completion_tokens"}
_TEXT = _COMMON | {"prompt"}

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    }
)
"""Fields that say nothing of the answer."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields of which we can honour but these values."""

_ROLES = ("system", "developer", "user", "assistant")

_KEPT_OF_MESSAGES = frozenset({"role", "content", "name"})


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and how its answer is to be sent."""

    request: Request
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request beside its body. `deadline` is on the process's clock."""

    deadline: float
    traceparent: str
    caller_id: str


def parse_chat(document: Object, arrival: Arrival, max_messages: int) -> Call:
    """Read the body of `/v1/chat/completions`. Raises `InvalidRequestError`."""
    fields = Fields(document)
    _refuse_unknown(document, _CHAT)
    return _call(fields, arrival, _chat(fields, max_messages), _chat_max_tokens(fields))


def parse_text(document: Object, arrival: Arrival) -> Call:
    """Read the body of `/v1/completions`. Raises `InvalidRequestError`."""
    fields = Fields(document)
    _refuse_unknown(document, _TEXT)
    max_tokens = fields.integer("max_tokens")
    if max_tokens is None:
        max_tokens = max(DEFAULT_COMPLETION_TOKENS, fields.integer("min_tokens") or 0)
    return _call(fields, arrival, _prompt(document.get("prompt")), ("max_tokens", max_tokens))


def _call(
    fields: Fields, arrival: Arrival, prompt: Prompt, max_tokens: tuple[str, int | None]
) -> Call:
    stream = fields.boolean("stream")
    request = Request(
        model=fields.string("model") or "",
        prompt=prompt,
        deadline=arrival.deadline,
        sampling=_sampling(fields, *max_tokens),
        stop=_stop(fields),
        include_stop=fields.boolean("include_stop_str_in_output"),
        keep_special=not fields.boolean("skip_special_tokens", default=True),
        priority=fields.integer("priority") or 0,
        traceparent=arrival.traceparent,
        caller_id=arrival.caller_id,
    )
    return Call(request, stream, _include_usage(fields, stream=stream))


def _refuse_unknown(document: Object, known: frozenset[str]) -> None:
    for name, value in document.items():
        if name in known or name in _IGNORED or value is None:
            continue
        allowed = _ONLY.get(name)
        if allowed is None:
            raise InvalidRequestError(f"{name[:64]!r} is not a known field", field=name[:64])
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise InvalidRequestError(f"{name}: this value is not supported", field=name)


def _chat_max_tokens(fields: Fields) -> tuple[str, int | None]:
    newer = fields.integer("max_completion_tokens")
    older = fields.integer("max_tokens")
    return ("max_tokens", older) if newer is None else ("max_completion_tokens", newer)


def _sampling(fields: Fields, max_tokens_name: str, max_tokens: int | None) -> Sampling:
    numbers: dict[str, Any] = {name: fields.number(name) for name in _FLOATS}
    stop_token_ids = _token_ids(fields.integers("stop_token_ids"), "stop_token_ids")
    try:
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=fields.integer("min_tokens") or 0,
            top_k=fields.integer("top_k"),
            seed=fields.integer("seed"),
            stop_token_ids=stop_token_ids,
            ignore_eos=fields.boolean("ignore_eos"),
            **numbers,
        )
    except InvalidRequestError as error:
        if error.field != "max_tokens":
            raise
        message = error.message.replace("max_tokens", max_tokens_name, 1)
        raise InvalidRequestError(message, field=max_tokens_name) from error


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.document.get("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not is_list_of(value, str):
        raise fields.wrong("stop", "a string or an array of strings")
    return tuple(value)


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise InvalidRequestError(
            "stream_options is only allowed with stream", field="stream_options"
        )
    for name, value in options.document.items():
        if name not in ("include_usage", "include_obfuscation") and value not in (None, False):
            full = options.name(name[:64])
            raise InvalidRequestError(f"{full} is not supported", field=full)
    return options.boolean("include_usage")


def _prompt(value: object) -> Prompt:
    """Read a prompt: text or token ids; a list of one of these counts as that one."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise InvalidRequestError("only one prompt per request is supported", field="prompt")
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if is_list_of(value, int):
        assert isinstance(value, list)
        return TokenPrompt(_token_ids(tuple(value), "prompt"))
    if value is None:
        raise InvalidRequestError("prompt is required", field="prompt")
    raise InvalidRequestError(
        f"prompt must be a string or an array of token ids, got {json_type(value)}",
        field="prompt",
    )


def _token_ids(ids: tuple[int, ...], field: str) -> tuple[int, ...]:
    if ids and (min(ids) < 0 or max(ids) > MAX_TOKEN_ID):
        bad = next(token for token in ids if not 0 <= token <= MAX_TOKEN_ID)
        raise InvalidRequestError(f"{field}: {bad} is no token id", field=field)
    return ids


def _chat(fields: Fields, max_messages: int) -> ChatPrompt:
    value = fields.document.get("messages")
    if value is None:
        raise InvalidRequestError("messages is required", field="messages")
    if not isinstance(value, list):
        raise fields.wrong("messages", "an array of messages")
    if len(value) > max_messages:
        raise InvalidRequestError(
            f"at most {max_messages} messages are allowed, got {len(value)}", field="messages"
        )
    return ChatPrompt(tuple([_message(item, index) for index, item in enumerate(value)]))


def _message(value: object, index: int) -> ChatMessage:
    path = f"messages[{index}]"
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object, got {json_type(value)}", field=path)
    fields = Fields(value, f"{path}.")
    role = fields.string("role")
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}", field=f"{path}.role"
        )
    for name, part in value.items():
        if name not in _KEPT_OF_MESSAGES and part not in (None, [], ""):
            full = fields.name(name[:64])
            raise InvalidRequestError(f"{full} is not supported", field=full)
    if "content" not in value and role != "assistant":
        raise InvalidRequestError(f"{path}.content is required", field=f"{path}.content")
    # Chat templates know of no developers, and OpenAI's mean the same by it.
    known = "system" if role == "developer" else role
    return ChatMessage(known, _content(fields), fields.string("name") or "")


def _content(fields: Fields) -> str:
    """Return a message's text: parts are joined, null is empty."""
    value = fields.document.get("content")
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fields.wrong("content", "a string or an array of parts")
    return "".join([_part(part, f"{fields.name('content')}[{i}]") for i, part in enumerate(value)])


def _part(value: object, path: str) -> str:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object, got {json_type(value)}", field=path)
    part = Fields(value, f"{path}.")
    if value.get("type") != "text":
        raise InvalidRequestError(f"{path}: only parts of type 'text' are supported", field=path)
    text = part.string("text")
    if text is None:
        raise part.wrong("text", "a string")
    return text
