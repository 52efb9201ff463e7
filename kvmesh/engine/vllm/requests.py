"""Between the mesh's requests and answers and vLLM's. Imports vLLM only to build its types."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvmesh.engine.base import EngineRequest, Finish
from kvmesh.engine.sequence import check_sampling
from kvmesh.errors import ContextLengthError, EngineError, InvalidRequestError
from kvmesh.types import LOGPROB_FLOOR, FinishReason, Sampling, TokenLogprob

_KNOBS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


# vLLM takes -1 for no seed at all: it gets the stream of a seed that hardly anybody asks for.
# On a CPU the lower 32 bits alone count, and are those of -1.
_SEED_OF_MINUS_ONE = -(2**62) - 1


def check_request(
    request: EngineRequest, context_length: int, vocab_size: int, eos_token_ids: frozenset[int]
) -> None:
    """Refuse what the engine can't run, before it has any work.

    Raises `InvalidRequestError` for an empty prompt or ids that can't be honoured,
    `ContextLengthError` where prompt and max_tokens (or one token) don't fit.
    """
    tokens = request.token_ids
    if not tokens:
        raise InvalidRequestError("the prompt is empty", field="prompt")
    completion = request.sampling.max_tokens or 1
    if len(tokens) + completion > context_length:
        raise ContextLengthError(
            f"{len(tokens)} prompt tokens and {completion} to generate do not fit "
            f"the context of {context_length}",
            field="prompt" if len(tokens) >= context_length else "max_tokens",
        )
    for token_id in (min(tokens), max(tokens)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"the prompt has the token id {token_id}, outside of 0 to {vocab_size - 1}",
                field="prompt",
            )
    check_sampling(request.sampling, vocab_size, eos_token_ids)


def continued(request: EngineRequest) -> EngineRequest:
    """Return the request that goes on from what of it is generated: to vLLM, that is prompt.

    Raises `InvalidRequestError` where vLLM would sample otherwise than in one run: it then
    has to know which tokens are the completion's.
    """
    generated, sampling = request.generated, request.sampling
    if not generated:
        return request
    spans = any(len(sequence) > 1 for sequence in sampling.bad_words)
    seeded = sampling.seed is not None and sampling.temperature != 0
    if sampling.presence_penalty or sampling.frequency_penalty or spans or seeded:
        raise InvalidRequestError(
            "vLLM can't go on with a completion that has a seed, presence or frequency penalties"
            " or bad words of several tokens",
            field="generated_token_ids",
        )
    count, most = len(generated), sampling.max_tokens
    if most is not None and most <= count:
        raise InvalidRequestError("max_tokens were sampled already", field="max_tokens")
    left = replace(
        sampling,
        max_tokens=None if most is None else most - count,
        min_tokens=max(0, sampling.min_tokens - count),
    )
    return replace(request, token_ids=[*request.token_ids, *generated], generated=(), sampling=left)


def completion_limit(request: EngineRequest, context_length: int) -> int:
    """Return how many tokens the request may generate at most."""
    room = context_length - len(request.token_ids)
    asked = request.sampling.max_tokens
    return room if asked is None else min(asked, room)


def sampling_arguments(
    sampling: Sampling,
    defaults: Mapping[str, Any],
    eos_token_ids: frozenset[int],
    max_tokens: int,
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `SamplingParams`.

    `defaults` are the model's own for knobs that the caller left unset. The ends of
    sequence go in as stop tokens, since vLLM without a tokenizer knows none.
    """
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops |= eos_token_ids
    arguments: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(sampling.min_tokens, max_tokens),
        "stop_token_ids": sorted(stops),
        "ignore_eos": sampling.ignore_eos,
        "seed": _SEED_OF_MINUS_ONE if sampling.seed == -1 else sampling.seed,
        "detokenize": False,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        # What vLLM makes of words with a tokenizer, which it has none of here.
        "_bad_words_token_ids": [list(sequence) for sequence in sampling.bad_words] or None,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
    }
    for knob in _KNOBS:
        value = getattr(sampling, knob)
        if value is None:
            value = defaults.get(knob)
        if value is not None:
            arguments[knob] = value
    return arguments


def sampling_params(arguments: Mapping[str, Any], kv_transfer: Mapping[str, Any] | None) -> Any:
    """Build vLLM's `SamplingParams`: deltas, and what its KV connector is to do."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    extra = None if kv_transfer is None else {"kv_transfer_params": dict(kv_transfer)}
    return SamplingParams(
        **arguments, output_kind=RequestOutputKind.DELTA, extra_args=extra, skip_clone=True
    )


def prompt_input(request: EngineRequest) -> Any:
    """Return a prompt of token ids in the form that vLLM takes without more processing."""
    from vllm.inputs import tokens_input

    return tokens_input(list(request.token_ids))


def finish_of(completion: Any, cached_tokens: int, stop_token_ids: Sequence[int]) -> Finish:
    """Return how a finished vLLM completion ended. Raises `EngineError` if it failed.

    `stop_token_ids` are the request's own; vLLM also has the model's ends among its stops.
    """
    stop = completion.stop_reason
    match completion.finish_reason:
        case "stop" | "repetition":
            token = stop if stop in stop_token_ids else None
            return Finish(FinishReason.STOP, cached_tokens, token)
        case "length":
            return Finish(FinishReason.LENGTH, cached_tokens)
        case reason:
            raise EngineError(f"vLLM ended the request: {reason}")


def logprobs_of(completion: Any, count: int | None) -> Sequence[TokenLogprob] | None:
    """Return the log probabilities of a vLLM completion's new tokens; None unless asked for.

    `count` is how many of the likeliest were. Raises `EngineError` if some are missing.
    """
    if count is None:
        return None
    tokens, rows = completion.token_ids, completion.logprobs or ()
    if len(rows) != len(tokens):
        raise EngineError(f"vLLM gave {len(rows)} log probabilities for {len(tokens)} tokens")
    return tuple(_logprob(row, token, count) for row, token in zip(rows, tokens, strict=True))


def prompt_logprobs_of(request: EngineRequest, output: Any) -> Sequence[TokenLogprob] | None:
    """Return the log probabilities of the prompt's tokens but the first, if they come now."""
    count, rows = request.sampling.prompt_logprobs, output.prompt_logprobs
    if count is None or not rows:
        return None
    if len(rows) != len(request.token_ids):
        raise EngineError(
            f"vLLM gave {len(rows)} log probabilities for {len(request.token_ids)} prompt tokens"
        )
    pairs = zip(rows[1:], request.token_ids[1:], strict=True)
    return tuple(_logprob(row, token, count) for row, token in pairs)


def _logprob(row: Mapping[int, Any], token: int, count: int) -> TokenLogprob:
    # vLLM adds the sampled token to the likeliest, where it is not one of them.
    likeliest = row.items() if len(row) <= count else ((k, v) for k, v in row.items() if k != token)
    ranked = sorted(likeliest, key=lambda item: item[1].rank)
    top = tuple((token_id, _finite(entry.logprob)) for token_id, entry in ranked)
    own = row[token]
    # Of one that is among the likeliest, this is its place in their order.
    return TokenLogprob(_finite(own.logprob), top, own.rank or 0)


def _finite(logprob: float) -> float:
    return LOGPROB_FLOOR if math.isnan(logprob) else min(max(logprob, LOGPROB_FLOOR), 0.0)
