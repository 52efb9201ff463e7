"""What a request may ask of sampling: ranges and limits, and their checks. Pure.

Each check raises `InvalidRequestError` with the field at fault.
"""

import math
from collections.abc import Mapping, Sequence

from kvmesh.errors import InvalidRequestError

MAX_LOGIT_BIASES = 1024
"""Tokens that one request may bias."""

MAX_ALLOWED_TOKENS = 1024
"""Tokens that one request may be held to."""

MAX_BAD_WORDS = 128
"""Token sequences that one request may forbid."""

MAX_BAD_WORD_TOKENS = 1024
"""Token ids in all of them."""

MAX_LOGPROBS = 20
"""Tokens whose log probabilities one request may get at each position."""

_ABOVE_0 = math.ulp(0.0)

SAMPLING_RANGES: Mapping[str, tuple[float, float, str]] = {
    "max_tokens": (1, 2**32 - 1, "at least 1 and below 2**32"),
    "min_tokens": (0, 2**32 - 1, "at least 0 and below 2**32"),
    "temperature": (0, 100, "between 0 and 100"),
    "top_p": (_ABOVE_0, 1, "above 0 and at most 1"),
    "top_k": (-1, 2**31 - 1, "-1 (all) or at least 1 and below 2**31"),
    "min_p": (0, 1, "between 0 and 1"),
    "presence_penalty": (-2, 2, "between -2 and 2"),
    "frequency_penalty": (-2, 2, "between -2 and 2"),
    "repetition_penalty": (_ABOVE_0, 100, "above 0 and at most 100"),
    "seed": (-(2**63), 2**63 - 1, "at least -2**63 and below 2**63"),
    "logprobs": (0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
}
"""The least and the greatest value of each number of `Sampling`, and that in words."""


def check_ranges(numbers: Mapping[str, float | None]) -> None:
    """Refuse numbers out of `SAMPLING_RANGES`, by name; None is in range."""
    for name, value in numbers.items():
        low, high, words = SAMPLING_RANGES[name]
        if (value is not None and not low <= value <= high) or (name, value) == ("top_k", 0):
            raise InvalidRequestError(f"{name} must be {words}, got {value}", field=name)


def check_allowed(token_ids: Sequence[int]) -> None:
    """Refuse more than can be held to."""
    if len(token_ids) > MAX_ALLOWED_TOKENS:
        raise InvalidRequestError(
            f"allowed_token_ids may have {MAX_ALLOWED_TOKENS} ids, got {len(token_ids)}",
            field="allowed_token_ids",
        )


def check_bad_words(sequences: Sequence[Sequence[int]]) -> None:
    """Refuse too many token sequences, too long ones and empty ones."""
    total = sum(map(len, sequences))
    if not all(sequences):
        raise InvalidRequestError("bad_words has one without a token", field="bad_words")
    if len(sequences) > MAX_BAD_WORDS or total > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            f"bad_words may be {MAX_BAD_WORDS} sequences with {MAX_BAD_WORD_TOKENS} tokens in "
            f"all, got {len(sequences)} with {total}",
            field="bad_words",
        )


def check_logit_bias(pairs: Sequence[tuple[int, float]]) -> None:
    """Refuse too many, ids that are none or come twice, and biases out of range."""

    def refuse(message: str) -> InvalidRequestError:
        return InvalidRequestError(message, field="logit_bias")

    if len(pairs) > MAX_LOGIT_BIASES:
        raise refuse(f"logit_bias may have {MAX_LOGIT_BIASES} entries, got {len(pairs)}")
    if len(dict(pairs)) < len(pairs):
        raise refuse("logit_bias has a token id twice")
    for token_id, bias in pairs:
        if not 0 <= token_id < 2**32:
            raise refuse(f"logit_bias has a token id out of range: {token_id}")
        if not -100 <= bias <= 100:  # so written, NaN is outside
            raise refuse(f"logit_bias must be between -100 and 100, got {bias} for {token_id}")
