"""What an answer of several choices is billed."""

from collections.abc import Mapping

from kvmesh.types import Completion, Usage
from services.frontend.request import Request


def total_usage(request: Request, completions: Mapping[int, Completion]) -> Usage:
    """Return the usage of a whole answer from those of its choices, by index.

    A prompt counts once, however often it is answered. Of its tokens those count as
    cached that every choice found cached: what one choice computed is no discount
    for the others.
    """
    prompt_tokens = completion_tokens = cached_tokens = 0
    for first in range(0, request.choices, request.n):
        usages = [
            completions[index].usage
            for index in range(first, first + request.n)
            if index in completions
        ]
        counted = [usage for usage in usages if usage is not None]
        completion_tokens += sum(usage.completion_tokens for usage in counted)
        prompt_tokens += max((usage.prompt_tokens for usage in counted), default=0)
        cached_tokens += min((usage.cached_tokens for usage in counted), default=0)
    return Usage(prompt_tokens, completion_tokens, cached_tokens)
