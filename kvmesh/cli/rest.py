"""A small client of the OpenAI-compatible REST interface: enough to chat and to see readiness."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvmesh.cli.console import CommandError

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation to be answered. None: the server's default."""

    messages: Sequence[dict[str, str]]
    max_tokens: int | None = None
    temperature: float | None = None
    seconds: float = 120.0
    """The longest silence."""
    api_key: str = ""


async def first_model(url: str, api_key: str = "") -> str:
    """Return the model that a frontend serves, the first of several."""
    async with _client(url, 10.0, api_key) as client:
        try:
            response = await client.get("/v1/models")
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
    if response.is_error:
        raise CommandError(_message(response.status_code, response.content))
    models = response.json()["data"]
    if not models:
        raise CommandError(f"{url} serves no model now: see `kvmesh status`")
    return str(models[0]["id"])


async def chat(url: str, model: str, ask: Ask) -> AsyncIterator[str]:
    """Yield the answer as it comes. Raises CommandError if it fails or breaks off."""
    body = {
        "model": model,
        "messages": list(ask.messages),
        "stream": True,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
    }
    body = {name: value for name, value in body.items() if value is not None}
    async with _client(url, ask.seconds, ask.api_key) as client:
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    raise CommandError(_message(response.status_code, await response.aread()))
                async for text in _texts(response):
                    yield text
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error


async def is_ready(url: str) -> bool:
    """Whether a frontend can serve some model end to end."""
    async with _client(url, 2.0) as client:
        try:
            response = await client.get("/ready")
        except httpx.HTTPError:
            return False
    return response.status_code == httpx.codes.OK


def _client(url: str, seconds: float, api_key: str = "") -> httpx.AsyncClient:
    timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
    headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
    # A proxy is never the way to a local cluster.
    return httpx.AsyncClient(base_url=url, timeout=timeout, headers=headers, trust_env=False)


async def _texts(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise CommandError(f"the answer broke off: {_error_text(event)}")
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise CommandError("the answer broke off: the connection ended too early")


def _message(status: int, content: bytes) -> str:
    try:
        return _error_text(json.loads(content))
    except ValueError:
        return f"the frontend answered with HTTP status {status}"


def _error_text(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return f"the frontend answered {json.dumps(document)[:200]}"


def _unreachable(url: str, error: httpx.HTTPError) -> CommandError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return CommandError(f"nothing answers at {url}: is the cluster up? Try `kvmesh status`")
    if isinstance(error, httpx.TimeoutException):
        return CommandError(f"{url} has been silent for too long")
    return CommandError(f"{url}: {error or type(error).__name__}")
