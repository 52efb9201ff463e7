"""Log probabilities in the two shapes that OpenAI's APIs have for them."""

from collections.abc import Sequence
from typing import Any

from kvmesh.types import LOGPROB_FLOOR, TextLogprob, TokenScore

_DECIMALS = 6
"""Engines compute in 32 bits: what is beyond is noise."""


def chat_logprobs(entries: Sequence[TextLogprob], *, as_ids: bool) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice; `as_ids`: tokens are named by id."""
    content = [
        {
            **_scored(entry.token, as_ids=as_ids),
            "top_logprobs": [_scored(score, as_ids=as_ids) for score in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[TextLogprob], *, as_ids: bool) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice; `as_ids`: tokens are named by id."""
    return {
        "tokens": [_name(entry.token, as_ids=as_ids) for entry in entries],
        "token_logprobs": [_number(entry.token) for entry in entries],
        "top_logprobs": [_by_name(entry, as_ids=as_ids) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def prompt_logprobs(entries: Sequence[TextLogprob]) -> list[dict[str, Any] | None]:
    """Return the `prompt_logprobs` of a prompt: null for its first token, which nothing predicts.

    For each other token an object by id: the token itself, and the likeliest ones.
    """
    return [None if entry.token.logprob is None else _by_id(entry) for entry in entries]


def _by_id(entry: TextLogprob) -> dict[str, Any]:
    found = {str(entry.token.token_id): _ranked(entry.token, entry.rank)}
    for place, score in enumerate(entry.top, 1):
        found[str(score.token_id)] = _ranked(score, place)
    return found


def _ranked(score: TokenScore, rank: int) -> dict[str, Any]:
    return {
        "logprob": _number(score),
        "rank": rank or None,
        "decoded_token": _name(score, as_ids=False),
    }


def _scored(score: TokenScore, *, as_ids: bool) -> dict[str, Any]:
    return {
        "token": _name(score, as_ids=as_ids),
        "logprob": _number(score),
        "bytes": list(score.text),
    }


def _by_name(entry: TextLogprob, *, as_ids: bool) -> dict[str, float | None] | None:
    """Return the likeliest tokens, and the token itself, which is always among them."""
    if entry.token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for score in entry.top:
        # Parts of characters may look alike: the likeliest has the name.
        found.setdefault(_name(score, as_ids=as_ids), _number(score))
    found[_name(entry.token, as_ids=as_ids)] = _number(entry.token)
    return found


def _name(score: TokenScore, *, as_ids: bool) -> str:
    return f"token_id:{score.token_id}" if as_ids else score.text.decode(errors="replace")


def _number(score: TokenScore) -> float | None:
    """Return a number that JSON has; None for what nothing predicts."""
    value = score.logprob
    if value is None:
        return None
    # So written, NaN is the floor as well; and adding 0 makes of -0.0 a 0.0.
    return round(value, _DECIMALS) + 0.0 if value > LOGPROB_FLOOR else LOGPROB_FLOOR
