"""Sends one request and reads the answer, whichever way it comes, into one form."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvmesh.testing.differential.asks import (
    CHAT,
    COMPLETIONS,
    PROBE_TOKENS,
    PROBED,
    Ask,
    Said,
)

AT_ONCE = 6
"""Requests sent at the same time: enough for batches of every kind."""

TIMEOUT_SECONDS = 300.0

_CLASSES = {
    # vLLM's types
    "BadRequestError": "bad request",
    "Bad Request": "bad request",
    "UnprocessableEntityError": "bad request",
    "NotFoundError": "not found",
    "Not Found": "not found",
    "Method Not Allowed": "bad method",
    "InternalServerError": "server error",
    "Internal Server Error": "server error",
    "NotImplementedError": "not supported",
    # ours, which are OpenAI's
    "invalid_request_error": "bad request",
    "server_error": "server error",
}
_CODES = {
    # What OpenAI tells by the code and not by the type.
    "model_not_found": "not found",
    "not_found": "not found",
    "method_not_allowed": "bad method",
    "unsupported_media_type": "bad media type",
}

_DOCUMENTS = {
    "/tokenize": ("tokens", "count", "max_model_len", "token_strs"),
    "/detokenize": ("prompt",),
}
"""What of a route's answer is compared; of others it is the status alone."""


@dataclass(slots=True)
class Position:
    """The log probabilities at one place: the token's own, and the likeliest ones'."""

    token: str
    logprob: float | None
    top: dict[str, float]
    offset: int | None = None
    utf8: list[int] | None = None


@dataclass(slots=True)
class Ranked:
    """A token of a prompt's log probabilities: its place among all, from 1, and its text."""

    logprob: float
    rank: int | None
    text: str | None


PromptLogprobs = list[dict[str, Ranked] | None]
"""For each token of a prompt what is told at its place, by id."""


@dataclass(slots=True)
class Choice:
    """One choice, put together if it was streamed. `logprobs` None: there are none.

    `prompt` are the log probabilities of its prompt, if they are told in the choice.
    """

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Position] | None = None
    prompt: PromptLogprobs | None = None


@dataclass(slots=True)
class Answer:
    """An answer, whole or streamed. `raw` is what was read, for people.

    `labels` is what it calls itself: object, model, prefix of the id, role. `prompt` are the
    log probabilities of the prompt, if they are told beside the choices. `done`: it ended
    as it should. `usage_with_text`: usage came together with text.
    """

    status: int
    error: str | None = None
    labels: set[str] = field(default_factory=set)
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt: PromptLogprobs | None = None
    usage: tuple[int, int, int] | None = None
    usage_with_text: bool = False
    done: bool = True
    document: Any = None
    raw: str = ""


async def ask_all(url: str, asks: Sequence[Ask]) -> list[Answer]:
    """Send all requests, several at once; return their answers in the same order."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, ask: Ask) -> Answer:
        async with places:
            return await fetch(client, ask)

    async with _client(url) as client, asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(one(client, ask)) for ask in asks]
    return [task.result() for task in sent]


async def what_is_said(vllm_url: str, model: str) -> dict[str, Said]:
    """Ask a vLLM server, which alone tells token ids, how it goes on after `PROBED`."""
    said: dict[str, Said] = {}
    async with _client(vllm_url) as client:
        for prompt in PROBED:
            body = {"model": model, "prompt": prompt, "max_tokens": PROBE_TOKENS}
            body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
            response = await client.post(COMPLETIONS, json=body)
            (choice,) = response.raise_for_status().json()["choices"]
            said[prompt] = Said(choice["text"], tuple(choice["token_ids"]))
    return said


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)


async def fetch(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """Send a request and read its answer to the end."""
    content = ask.body if isinstance(ask.body, bytes | None) else json.dumps(ask.body).encode()
    headers = {"content-type": ask.content_type} if content is not None else {}
    async with client.stream(ask.method, ask.path, content=content, headers=headers) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await _streamed(response, ask)
        raw = (await response.aread()).decode(errors="replace")
    return _whole(response.status_code, raw, ask)


def _whole(status: int, raw: str, ask: Ask) -> Answer:
    answer = Answer(status, raw=raw)
    try:
        document = json.loads(raw)
    except ValueError:
        document = None
    if status >= 400:
        answer.error = error_class(document)
    elif isinstance(document, dict) and ask.path in (COMPLETIONS, CHAT):
        _take(answer, document)
    elif isinstance(document, dict) and ask.path in _DOCUMENTS:
        answer.document = {name: document.get(name) for name in _DOCUMENTS[ask.path]}
    return answer


async def _streamed(response: httpx.Response, ask: Ask) -> Answer:
    answer = Answer(response.status_code, done=False)
    async with aclosing(_events(response)) as events:
        async for event in events:
            answer.raw += event + "\n"
            if event == "[DONE]":
                answer.done = True
                continue
            document = json.loads(event)
            if "error" in document:
                answer.error = error_class(document)
            else:
                _take(answer, document)
    return answer


async def _events(response: httpx.Response) -> AsyncGenerator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def error_class(document: Any) -> str:
    """Return the class of an error object, by one name for both servers."""
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return "no error object"
    by_code = _CODES.get(error["code"]) if isinstance(error.get("code"), str) else None
    kind = str(error.get("type"))
    return by_code or _CLASSES.get(kind, kind)


def _take(answer: Answer, document: Mapping[str, Any]) -> None:
    answer.labels |= {document["object"], document["model"], document["id"].partition("-")[0]}
    answer.prompt = _prompt(document.get("prompt_logprobs"))
    for given in document["choices"]:
        choice = answer.choices.setdefault(given["index"], Choice())
        body = given.get("message") or given.get("delta") or given
        answer.labels |= {body["role"]} if "role" in body else set()
        choice.text += body.get("text") or body.get("content") or ""
        if given.get("finish_reason") is not None:
            choice.finish_reason = given["finish_reason"]
            choice.stop_reason = given.get("stop_reason")
        choice.prompt = _prompt(given.get("prompt_logprobs"))
        positions = _positions(given.get("logprobs"))
        if positions is not None:
            choice.logprobs = (choice.logprobs or []) + positions
    usage = document.get("usage")
    if usage is not None:
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        prompt, completion, total = (usage[name] for name in names)
        answer.usage = prompt, completion, total
        answer.usage_with_text |= bool(document["choices"])


def _prompt(told: Sequence[Mapping[str, Any] | None] | None) -> PromptLogprobs | None:
    if told is None:
        return None
    return [
        None
        if row is None
        else {
            id_: Ranked(entry["logprob"], entry["rank"], entry["decoded_token"])
            for id_, entry in row.items()
        }
        for row in told
    ]


def _positions(logprobs: Mapping[str, Any] | None) -> list[Position] | None:
    if logprobs is None:
        return None
    if "content" in logprobs:
        return [
            Position(
                token=entry["token"],
                logprob=entry["logprob"],
                top={top["token"]: top["logprob"] for top in entry["top_logprobs"]},
                utf8=entry["bytes"],
            )
            for entry in logprobs["content"] or []
        ]
    columns = zip(
        logprobs["tokens"],
        logprobs["token_logprobs"],
        logprobs["top_logprobs"] or [None] * len(logprobs["tokens"]),
        logprobs["text_offset"],
        strict=True,
    )
    return [Position(token, value, top or {}, offset) for token, value, top, offset in columns]
