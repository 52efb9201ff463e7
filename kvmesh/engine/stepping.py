"""An engine's steps as an iterator, for engines that push them to a sink."""

import asyncio
from collections.abc import Sequence

from kvmesh.engine.base import Finish, Step
from kvmesh.types import TokenLogprob


class StepInbox:
    """Collects one request's steps until they are asked for, joined into one.

    `put` is a `StepSink`. What is kept is bounded by the request's own max_tokens.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt: Sequence[TokenLogprob] | None = None
        self._cached_tokens: int | None = None
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, item: Step | Exception) -> None:
        """Add a step, or the error that ends the request."""
        if isinstance(item, Exception):
            self._error = item
        else:
            self._tokens.extend(item.token_ids)
            if item.logprobs is not None:
                self._logprobs.extend(item.logprobs)
            if item.prompt_logprobs is not None:
                self._prompt = item.prompt_logprobs
            self._cached_tokens = item.cached_tokens
            self._finish = item.finish
        self._arrived.set()

    async def get(self) -> Step:
        """Wait for tokens or the end. An error comes after the tokens before it."""
        await self._arrived.wait()
        if self._error is not None and not self._tokens:
            raise self._error
        logprobs, prompt = tuple(self._logprobs) or None, self._prompt
        step = Step(tuple(self._tokens), self._finish, logprobs, prompt, self._cached_tokens)
        self._prompt = None
        self._tokens.clear()
        self._logprobs.clear()
        if self._error is None:
            self._arrived.clear()
        return step
