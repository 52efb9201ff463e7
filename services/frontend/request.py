"""What a caller wants, validated once: the only form in which it travels on."""

import re
import uuid
from dataclasses import dataclass, field
from typing import Literal

from xxhash import xxh3_64_hexdigest

from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from services.frontend.config import LimitsConfig

_CALLER_ID = re.compile(r"[!-~]{1,128}")

Operation = Literal["chat", "text_completion"]


def fresh_id() -> str:
    """Return an id that no other request has, here or elsewhere."""
    return uuid.uuid4().hex


def caller_id(text: str) -> str:
    """Return a caller's own request id if it may be echoed, else "".

    It is for the caller alone: nothing inside the mesh is ever named by it.
    """
    return text if _CALLER_ID.fullmatch(text) else ""


def session_key(text: str) -> str:
    """Return what names a caller's session to routers: short, and none of its own words."""
    return xxh3_64_hexdigest(text.encode()) if text else ""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, valid once built; raises `InvalidRequestError` naming the field.

    Each of `prompts` is answered `n` times: choice `i` is the answer to prompt `i // n`.
    With `echo` a choice begins with its prompt; without `generate` it is that alone.
    `truncate_to` keeps so many last tokens of a prompt; -1: as many as the context holds
    beside the completion.

    `deadline` is on the process's clock. `stop` strings end the text; with
    `include_stop` the text keeps the one that did. `keep_special`: special tokens show
    in the text. Answers do not have `bad_words`; those of `sampling` are further ones, as
    token ids. `sampling.prompt_logprobs` come with the first answer to each prompt.
    Requests of one `session` belong together, if there is one; those of one `fair_key` have
    one share where there is not enough for all. `id` is this process's own, `caller_id` the
    caller's, to be echoed.
    """

    model: str
    prompts: tuple[Prompt, ...]
    deadline: float
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    echo: bool = False
    generate: bool = True
    truncate_to: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    keep_special: bool = False
    bad_words: tuple[str, ...] = ()
    priority: int = 0
    session: str = ""
    fair_key: str = ""
    traceparent: str = ""
    caller_id: str = ""
    id: str = field(default_factory=fresh_id)

    def __post_init__(self) -> None:
        """Refuse what can be seen to be wrong without asking anybody."""
        if not self.model:
            raise InvalidRequestError("model is required", field="model")
        if not self.prompts:
            raise InvalidRequestError("a prompt is required", field="prompt")
        for prompt in self.prompts:
            _check_prompt(prompt)
        if not all(self.stop):
            raise InvalidRequestError("a stop string is empty", field="stop")
        if not all(self.bad_words):
            raise InvalidRequestError("bad_words has an empty one", field="bad_words")
        if self.n < 1:
            raise InvalidRequestError(f"n must be at least 1, got {self.n}", field="n")
        if self.truncate_to is not None and not (
            self.truncate_to == -1 or 1 <= self.truncate_to < 2**32
        ):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or at least 1, got {self.truncate_to}",
                field="truncate_prompt_tokens",
            )
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequestError("priority must fit in 32 bits", field="priority")

    @property
    def choices(self) -> int:
        """How many answers are wanted."""
        return len(self.prompts) * self.n

    @property
    def operation(self) -> Operation:
        """What is done, as `gen_ai.operation.name` calls it."""
        return "chat" if isinstance(self.prompts[0], ChatPrompt) else "text_completion"


def check_limits(request: Request, limits: LimitsConfig) -> None:
    """Raise `InvalidRequestError` for a request that asks for more than it may."""
    _at_most(limits.choices, request.choices, "choices (n for each prompt)", "n")
    _at_most(limits.stops, len(request.stop), "stop strings", "stop")
    longest = max(map(len, request.stop), default=0)
    _at_most(limits.stop_chars, longest, "characters in a stop string", "stop")
    _at_most(limits.bad_words, len(request.bad_words), "bad_words", "bad_words")
    longest = max(map(len, request.bad_words), default=0)
    _at_most(limits.bad_word_chars, longest, "characters in one of bad_words", "bad_words")
    stop_ids = len(request.sampling.stop_token_ids)
    _at_most(limits.stop_token_ids, stop_ids, "stop_token_ids", "stop_token_ids")


def _at_most(limit: int, count: int, what: str, field_name: str) -> None:
    if count > limit:
        raise InvalidRequestError(
            f"at most {limit} {what} are allowed, got {count}", field=field_name
        )


def _check_prompt(prompt: Prompt) -> None:
    match prompt:
        case TextPrompt(text) if not text:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        case TokenPrompt(token_ids) if not token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        case ChatPrompt(messages) if not messages:
            raise InvalidRequestError("at least one message is required", field="messages")
        case _:
            pass
