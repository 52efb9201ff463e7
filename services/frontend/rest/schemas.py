"""Request bodies, read into `Request`s. What can't be honoured is refused by name."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.sampling import MAX_LOGIT_BIASES
from kvmesh.types import Prompt, Sampling, TextPrompt, TokenPrompt
from services.frontend.config import LimitsConfig
from services.frontend.request import Request, caller_id, session_key
from services.frontend.rest.body import Body
from services.frontend.rest.fields import TOKEN_IDS_END, Fields, invalid, is_list_of, json_type
from services.frontend.rest.messages import read_chat
from services.frontend.rest.request_fields import (
    CHAT,
    DEFAULT_COMPLETION_TOKENS,
    DETOKENIZE,
    MAX_METADATA,
    TEXT,
    TOKENIZE_CHAT,
    TOKENIZE_TEXT,
)

Values = Mapping[str, Any]

_CHAT, _TEXT = Fields(CHAT), Fields(TEXT)
_TOKENIZE_CHAT, _TOKENIZE_TEXT = Fields(TOKENIZE_CHAT), Fields(TOKENIZE_TEXT)
_DETOKENIZE = Fields(DETOKENIZE)

_FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

_TOKEN_ID = re.compile(r"-?[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and how its answer is to be sent.

    `tokens_as_ids`: log probabilities name tokens by their ids.
    """

    request: Request
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tokens_as_ids: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request beside its body. `deadline` is on the process's clock."""

    deadline: float
    traceparent: str
    caller_id: str
    session: str = ""
    fair_key: str = ""


ParseBody = Callable[[Body, Arrival, LimitsConfig], Call]
"""What reads the body of a route. Raises `InvalidRequestError`."""


def parse_chat(body: Body, arrival: Arrival, limits: LimitsConfig) -> Call:
    """Read the body of `/v1/chat/completions`. Raises `InvalidRequestError`."""
    values = _CHAT.read(body.values)
    prompt = read_chat(body, values, limits.messages)
    logprobs = values["top_logprobs"]
    if not values["logprobs"]:
        if logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        logprobs = None
    elif logprobs is None:
        logprobs = 0
    newer = values["max_completion_tokens"]
    names = {"logprobs": "top_logprobs"}
    if newer is not None:
        names["max_tokens"] = "max_completion_tokens"
    length = values["max_tokens"] if newer is None else newer
    return _call(values, arrival, (prompt,), _sampling(values, length, logprobs, names))


def parse_text(body: Body, arrival: Arrival, limits: LimitsConfig) -> Call:
    """Read the body of `/v1/completions`. Raises `InvalidRequestError`."""
    values = _TEXT.read(body.values)
    special = values["add_special_tokens"]
    prompts = _prompts(values["prompt"], limits.choices, add_special_tokens=special)
    length, generate = values["max_tokens"], True
    if length is None:
        length = max(DEFAULT_COMPLETION_TOKENS, values["min_tokens"])
    elif length == 0 and values["echo"]:
        length, generate = None, False
    sampling = _sampling(values, length, values["logprobs"], {})
    return _call(values, arrival, prompts, sampling, generate=generate)


def parse_tokenize(body: Body, arrival: Arrival, limits: LimitsConfig) -> Call:
    """Read the body of `/tokenize`: a prompt or messages. Raises `InvalidRequestError`."""
    if body.values.get("messages") is not None:
        values = _TOKENIZE_CHAT.read(body.values)
        return _plain(values, arrival, read_chat(body, values, limits.messages))
    values = _TOKENIZE_TEXT.read(body.values)
    return _plain(values, arrival, TextPrompt(values["prompt"], values["add_special_tokens"]))


def parse_detokenize(body: Body, arrival: Arrival, limits: LimitsConfig) -> Call:
    """Read the body of `/detokenize`. Raises `InvalidRequestError`."""
    values = _DETOKENIZE.read(body.values)
    if not values["tokens"]:
        raise invalid("tokens", "is empty")
    tokens = TokenPrompt(_token_ids(values["tokens"], "tokens"))
    return _plain(values, arrival, tokens, keep_special=True)


def _plain(values: Values, arrival: Arrival, prompt: Prompt, *, keep_special: bool = False) -> Call:
    request = Request(
        model=values["model"],
        prompts=(prompt,),
        deadline=arrival.deadline,
        keep_special=keep_special,
        traceparent=arrival.traceparent,
        caller_id=arrival.caller_id,
    )
    return Call(request)


def _call(
    values: Values,
    arrival: Arrival,
    prompts: tuple[Prompt, ...],
    sampling: Sampling,
    *,
    generate: bool = True,
) -> Call:
    _check_notes(values)
    stop = values["stop"]
    request = Request(
        model=values["model"],
        prompts=prompts,
        deadline=arrival.deadline,
        sampling=sampling,
        n=_n(values),
        echo=values["echo"],
        generate=generate,
        truncate_to=values["truncate_prompt_tokens"],
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        include_stop=values["include_stop_str_in_output"],
        keep_special=not values["skip_special_tokens"],
        bad_words=tuple(values["bad_words"] or ()),
        priority=values["priority"],
        session=arrival.session or session_key(values["prompt_cache_key"] or ""),
        fair_key=arrival.fair_key,
        traceparent=arrival.traceparent,
        caller_id=arrival.caller_id or values["request_id"] or "",
    )
    if values["stream"] and values["prompt_logprobs"] is not None:
        raise invalid("prompt_logprobs", "is not available with stream")
    options = values["stream_options"] or {}
    if options and not values["stream"]:
        raise invalid("stream_options", "is only allowed with stream")
    include_usage = options.get("include_usage", False)
    return Call(
        request,
        stream=values["stream"],
        include_usage=include_usage,
        continuous_usage=include_usage and options["continuous_usage_stats"],
        tokens_as_ids=values["return_tokens_as_token_ids"],
    )


def _check_notes(values: Values) -> None:
    """Refuse what is wrong with fields that say nothing of the answer."""
    metadata, request_id = values["metadata"] or {}, values["request_id"]
    if len(metadata) > MAX_METADATA or not is_list_of([*metadata.values()], str):
        raise invalid("metadata", f"must be an object of at most {MAX_METADATA} strings")
    if request_id is not None and not caller_id(request_id):
        raise invalid("request_id", "must be 1 to 128 printable characters of ASCII, no spaces")


def _n(values: Values) -> int:
    n: int = values["n"]
    if values["best_of"] not in (None, 1, n):
        raise invalid("best_of", f"can only be 1 or the same as n ({n})")
    return n


def _sampling(
    values: Values, max_tokens: int | None, logprobs: int | None, names: Mapping[str, str]
) -> Sampling:
    """Return how to sample; `names` is what the body calls a field that errors name."""
    numbers: dict[str, Any] = {
        name: None if values[name] is None else float(values[name]) for name in _FLOATS
    }
    allowed = values["allowed_token_ids"]
    if allowed == []:
        raise invalid("allowed_token_ids", "is empty: no token could be sampled")
    try:
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=values["min_tokens"],
            top_k=-1 if values["top_k"] == 0 else values["top_k"],
            seed=values["seed"],
            stop_token_ids=_token_ids(values["stop_token_ids"] or (), "stop_token_ids"),
            ignore_eos=values["ignore_eos"],
            logit_bias=_biases(values["logit_bias"] or {}),
            logprobs=logprobs,
            prompt_logprobs=values["prompt_logprobs"],
            allowed_token_ids=_token_ids(allowed or (), "allowed_token_ids"),
            **numbers,
        )
    except InvalidRequestError as error:
        name = names.get(error.field or "")
        if name is None or error.field is None:
            raise
        raise InvalidRequestError(
            error.message.replace(error.field, name, 1), field=name
        ) from error


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_LOGIT_BIASES:
        raise invalid("logit_bias", f"may have {MAX_LOGIT_BIASES} entries, got {len(given)}")
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise invalid("logit_bias", f"has a key that is no token id: {key[:32]!r}")
    return tuple((int(key), float(bias)) for key, bias in given.items())


def _prompts(value: str | list[Any], most: int, *, add_special_tokens: bool) -> tuple[Prompt, ...]:
    """Read one prompt or several: text, or token ids."""
    listed = isinstance(value, list) and not is_list_of(value, int)
    several: list[Any] = list(value) if listed else [value]
    if value == []:
        raise invalid("prompt", "is empty")
    if len(several) > most:
        raise invalid("prompt", f"may be at most {most} prompts, got {len(several)}")
    if is_list_of(several, str):
        return tuple(TextPrompt(text, add_special_tokens) for text in several)
    if all(is_list_of(ids, int) for ids in several):
        return tuple(TokenPrompt(_token_ids(ids, "prompt")) for ids in several)
    odd = next((one for one in several if type(one) is not type(several[0])), several[0])
    raise invalid(
        "prompt",
        f"must be strings, or token ids, and not a mix of them: there is {json_type(odd)}",
    )


def _token_ids(ids: Iterable[int], field: str) -> tuple[int, ...]:
    read = tuple(ids)
    if read and (min(read) < 0 or max(read) >= TOKEN_IDS_END):
        bad = next(token for token in read if not 0 <= token < TOKEN_IDS_END)
        raise InvalidRequestError(f"{field}: {bad} is no token id", field=field)
    return read
