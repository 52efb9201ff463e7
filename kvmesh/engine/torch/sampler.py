"""Picks tokens from logits."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from kvmesh.engine.torch.plan import Span
from kvmesh.engine.torch.sequence import Knobs, TorchSequence
from kvmesh.types import LOGPROB_FLOOR, TokenLogprob

_FRACTION_BITS = 52  # of a double, less one: the half added must not round up to 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_FIRST_GUESS = 64  # candidates looked at for top_p, before more
_SCORED_AT_ONCE = 32  # rows whose distributions are in memory together


def pick(logits: Any, sequences: Sequence[TorchSequence]) -> list[int]:
    """Return the next token of each sequence, from its row of `logits`.

    A pure function: the same logits and tokens give the same pick.
    """
    plain = [index for index, sequence in enumerate(sequences) if _is_plain(sequence)]
    picked = [0] * len(sequences)
    if plain:
        rows = logits if len(plain) == len(sequences) else logits[plain]
        for index, token in zip(plain, rows.argmax(-1).tolist(), strict=True):
            picked[index] = token
    for index in sorted(set(range(len(sequences))) - set(plain)):
        picked[index] = _pick_one(logits[index].float().cpu().clone(), sequences[index])
    return picked


def measure(
    logits: Any, sequences: Sequence[TorchSequence], picked: Sequence[int]
) -> list[TokenLogprob | None]:
    """Return how likely each picked token was, for the sequences that ask for it.

    As in vLLM, by the logits as the model gives them, whatever was done to pick from them.
    """
    return [
        None if count is None else _told(logits[index : index + 1], [token], count)[0]
        for index, (count, token) in enumerate(
            zip((each.request.sampling.logprobs for each in sequences), picked, strict=True)
        )
    ]


def score(logits: Any, spans: Sequence[Span]) -> list[list[TokenLogprob]]:
    """Return for each span how likely the prompt's tokens behind its `scores` were.

    `logits` has a row for each of them, in order of the spans. By the logits as they are.
    """
    found, row = [], 0
    for span in spans:
        scores: list[TokenLogprob] = []
        count = span.sequence.request.sampling.prompt_logprobs or 0
        for at in range(0, len(span.scores), _SCORED_AT_ONCE):
            some = span.scores[at : at + _SCORED_AT_ONCE]
            tokens = span.sequence.tokens[some.start + 1 : some.stop + 1]
            scores += _told(logits[row : row + len(some)], tokens, count)
            row += len(some)
        found.append(scores)
    return found


def noise(seed: int, position: int, token_ids: Any) -> Any:
    """Return a number in (0, 1) for each token id: a random stream's, at a position.

    Equal on every machine and in every version.
    """
    key = xxh3_64_intdigest(struct.pack("<qQ", seed, position))
    with np.errstate(over="ignore"):  # integers wrap: this is splitmix64
        mixed = token_ids.astype(np.uint64) * _GOLDEN + np.uint64(key)
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MIX_1
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MIX_2
        mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(64 - _FRACTION_BITS)) + 0.5) / (1 << _FRACTION_BITS)


def probabilities(logits: Any, knobs: Knobs) -> Any:
    """Return the distribution to draw from, not normalized; temperature must be above 0.

    As in vLLM: temperature, min_p, top_k, then top_p of what is left. Equally probable
    tokens are in or out together, so that no order among them matters.
    """
    # In this order a tiny temperature makes no infinity.
    probs = torch.softmax((logits - logits.max()) / knobs.temperature, -1)
    if knobs.min_p:
        probs[probs < knobs.min_p * probs.max()] = 0
    vocab = probs.numel()
    if 0 < knobs.top_k < vocab:
        least = probs.topk(knobs.top_k).values[-1]
        probs[probs < least] = 0
    if knobs.top_p < 1:
        probs[probs < _least_of_top_p(probs, knobs.top_p)] = 0
    return probs


def penalize(logits: Any, knobs: Knobs, tokens: Sequence[int], prompt_length: int) -> None:
    """Apply the penalties to `logits` in place.

    Repetition counts the prompt too, presence and frequency only the completion.
    """
    if knobs.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(tokens)))
        values = logits[seen]
        factor = knobs.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    completion = tokens[prompt_length:]
    if completion and (knobs.presence_penalty or knobs.frequency_penalty):
        ids, counts = torch.tensor(completion).unique(return_counts=True)
        logits[ids] -= knobs.presence_penalty + knobs.frequency_penalty * counts


def _is_plain(sequence: TorchSequence) -> bool:
    knobs = sequence.knobs
    sampling = sequence.request.sampling
    steered = sampling.logit_bias or sampling.allowed_token_ids
    return not (knobs.temperature or knobs.penalizes or steered or sequence.banned_now)


def _pick_one(logits: Any, sequence: TorchSequence) -> int:
    knobs, tokens = sequence.knobs, sequence.tokens
    sampling = sequence.request.sampling
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(values, dtype=logits.dtype)
    if knobs.penalizes:
        penalize(logits, knobs, tokens, sequence.prompt_length)
    banned = sequence.banned_now
    if banned:
        logits[list(banned)] = -torch.inf
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        only = torch.full_like(logits, -torch.inf)
        only[allowed] = logits[allowed]
        logits = only
    if not knobs.temperature:
        return int(logits.argmax())
    probs = probabilities(logits, knobs)
    ids = probs.nonzero().flatten()
    # A race that each token wins with its probability. Unlike a draw from the cumulated
    # probabilities, it is hardly ever changed by the rounding errors of another batch.
    race = np.log(probs[ids].numpy()) - np.log(
        -np.log(noise(sequence.seed, len(tokens), ids.numpy()))
    )
    return int(ids[int(race.argmax())])


def _told(logits: Any, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return how likely each token was by its row of logits, and the `count` likeliest.

    Tokens that are equally likely share the first of their places.
    """
    rows = torch.log_softmax(logits.float(), -1).nan_to_num(nan=LOGPROB_FLOOR)
    rows = rows.clamp(LOGPROB_FLOOR, 0.0)
    own = rows[range(len(tokens)), list(tokens)]
    ranks = (rows > own.unsqueeze(-1)).sum(-1) + 1
    top = rows.topk(min(count, rows.shape[-1]))
    columns = (own, ranks, top.indices, top.values)
    return [
        TokenLogprob(logprob, tuple(zip(ids, values, strict=True)), rank)
        for logprob, rank, ids, values in zip(*(each.tolist() for each in columns), strict=True)
    ]


def _least_of_top_p(probs: Any, top_p: float) -> Any:
    """Return the smallest probability of the fewest tokens that have `top_p` of the mass."""
    needed = top_p * probs.sum()
    count, vocab = _FIRST_GUESS, probs.numel()
    while True:
        count = min(count, vocab)
        top = probs.topk(count).values
        mass = top.cumsum(0)
        if mass[-1] >= needed or count == vocab:
            return top[min(int(torch.searchsorted(mass, needed)), count - 1)]
        count *= 16
