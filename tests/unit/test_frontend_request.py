"""Requests: what can be refused without asking anybody."""

from typing import Any

import pytest

from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatMessage, ChatPrompt, Sampling, TextPrompt, TokenPrompt
from services.frontend.config import LimitsConfig
from services.frontend.request import Request, check_limits

LIMITS = LimitsConfig()


def request(**more: Any) -> Request:
    return Request(**{"model": "m", "prompts": (TextPrompt("x"),), "deadline": 1.0, **more})


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"model": ""}, "model"),
        ({"prompts": ()}, "prompt"),
        ({"prompts": (TextPrompt(""),)}, "prompt"),
        ({"prompts": (TextPrompt("hi"), TextPrompt(""))}, "prompt"),
        ({"prompts": (TokenPrompt(()),)}, "prompt"),
        ({"prompts": (ChatPrompt(()),)}, "messages"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"stop": ("a", "")}, "stop"),
        ({"truncate_to": 0}, "truncate_prompt_tokens"),
        ({"truncate_to": -2}, "truncate_prompt_tokens"),
        ({"priority": 2**31}, "priority"),
    ],
)
def test_what_is_wrong_is_named(more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(**more)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"n": LIMITS.choices + 1}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"n": 2, "prompts": (TextPrompt("x"),) * LIMITS.choices}, "n"),
        ({"prompts": (TextPrompt("x"),) * 100_000}, "n"),
        ({"stop": ("s",) * (LIMITS.stops + 1)}, "stop"),
        ({"stop": ("s",) * 500_000}, "stop"),
        ({"stop": ("s" * (LIMITS.stop_chars + 1),)}, "stop"),
        (
            {"sampling": Sampling(stop_token_ids=(1,) * (LIMITS.stop_token_ids + 1))},
            "stop_token_ids",
        ),
    ],
)
def test_a58_more_than_the_limits_is_refused(more: dict[str, Any], field: str) -> None:
    wanted = request(**more)
    with pytest.raises(InvalidRequestError) as caught:
        check_limits(wanted, LIMITS)
    assert caught.value.field == field


def test_what_the_limits_allow_is_taken() -> None:
    check_limits(
        request(
            n=LIMITS.choices,
            stop=("s" * LIMITS.stop_chars,) * LIMITS.stops,
            sampling=Sampling(stop_token_ids=(1,) * LIMITS.stop_token_ids),
        ),
        LIMITS,
    )


def test_choices_and_operation() -> None:
    assert request(n=3, prompts=(TextPrompt("x"), TextPrompt("y"))).choices == 6
    assert request().operation == "text_completion"
    chat = ChatPrompt((ChatMessage("user", "hi"),))
    assert request(prompts=(chat,)).operation == "chat"
