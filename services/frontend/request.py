"""What a caller wants, validated once: the only form in which it travels on."""

import re
import uuid
from dataclasses import dataclass, field
from typing import Literal

from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatPrompt, Prompt, Sampling, TextPrompt, TokenPrompt

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Of one stop string: text is held back for as long as one may still match."""

MAX_STOP_TOKEN_IDS = 256

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


@dataclass(frozen=True, slots=True)
class Request:
    """One request, valid once built; raises `InvalidRequestError` naming the field.

    `deadline` is on the process's clock. `stop` strings end the text; with
    `include_stop` the text keeps the one that did. `keep_special`: special tokens show
    in the text. `id` is this process's own, `caller_id` the caller's, to be echoed.
    """

    model: str
    prompt: Prompt
    deadline: float
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    keep_special: bool = False
    priority: int = 0
    traceparent: str = ""
    caller_id: str = ""
    id: str = field(default_factory=fresh_id)

    def __post_init__(self) -> None:
        """Refuse what can be seen to be wrong without asking anybody."""
        if not self.model:
            raise InvalidRequestError("model is required", field="model")
        _check_prompt(self.prompt)
        _check_stops(self.stop)
        if len(self.sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed", field="stop_token_ids"
            )
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequestError("priority must fit in 32 bits", field="priority")

    @property
    def operation(self) -> Operation:
        """What is done, as `gen_ai.operation.name` calls it."""
        return "chat" if isinstance(self.prompt, ChatPrompt) else "text_completion"


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


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}", field="stop"
        )
    for stop in stops:
        if not stop:
            raise InvalidRequestError("a stop string is empty", field="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"a stop string may have {MAX_STOP_CHARS} characters, got {len(stop)}", field="stop"
            )
