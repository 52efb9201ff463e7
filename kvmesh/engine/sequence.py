"""One request inside an engine that batches, and what may become one. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvmesh.engine.bad_words import BadWords
from kvmesh.engine.base import Announce, EngineRequest, Finish, StepSink
from kvmesh.errors import ContextLengthError, InvalidRequestError
from kvmesh.types import FinishReason, KvTicket, Sampling, TokenLogprob


class Kind(Enum):
    """What is asked of the engine."""

    GENERATE = "generate"
    PREFILL = "prefill"
    RESUME = "resume"


class Phase(Enum):
    """Where a sequence is. It holds blocks while pulling, running or held."""

    WAITING = auto()
    PULLING = auto()
    RUNNING = auto()
    HELD = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds every sequence of a model.

    `longest` is the most tokens of prompt and completion. `choices` is how many of the
    `vocab_size` ids can be sampled. Any of `eos_token_ids` ends a text.
    """

    vocab_size: int
    longest: int
    eos_token_ids: frozenset[int]
    choices: int


class BatchSequence:
    """A request's tokens and the blocks with their KV.

    `tokens` are prompt and completion, the first `computed` have KV. `hashes` name its full
    blocks. No token of `banned` is picked before there are `least` tokens, and none ever that
    completes one of `bad_words`. `left` is how many may still be picked. `sink` is None once
    nobody listens. Bigger `key` goes first. `logprob` is the newest picked token's, where the
    request asks for it. `scores` are how likely the prompt's tokens were, without the first,
    as far as that is known; None where nobody asks, and once they were handed over.
    `announce` gets the ticket of a prompt once that has its blocks, which it keeps then.

    Building one raises `InvalidRequestError`, with its field, for what can never run.
    """

    __slots__ = (
        "announce",
        "bad_words",
        "banned",
        "blocks",
        "cached_tokens",
        "computed",
        "ends",
        "hashes",
        "key",
        "kind",
        "least",
        "left",
        "logprob",
        "phase",
        "prompt_length",
        "request",
        "scores",
        "sink",
        "stops",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        request: EngineRequest,
        kind: Kind,
        ticket: KvTicket | None,
        sink: StepSink,
        limits: Limits,
    ) -> None:
        if ticket is not None and request.generated:
            raise InvalidRequestError("a ticket begins a completion", field="generated_token_ids")
        first = request.generated if ticket is None else ticket.first_token_ids
        sampling = request.sampling
        _check_tokens(request.token_ids, limits.vocab_size)
        for token_id in request.generated:
            _check_token(token_id, limits.vocab_size, "generated_token_ids")
        check_sampling(sampling, limits.vocab_size, limits.eos_token_ids)
        if kind is not Kind.GENERATE:
            refuse_prompt_logprobs(sampling)
        self.left = _max_tokens(request, len(first), limits.longest) - len(first)
        self.request = request
        self.kind = kind
        self.ticket = ticket
        self.sink: StepSink | None = sink
        self.key = (-request.priority, 0)
        self.tokens = [*request.token_ids, *first]
        self.prompt_length = len(request.token_ids)
        self.least = self.prompt_length + sampling.min_tokens
        self.stops = frozenset(sampling.stop_token_ids)
        self.ends = frozenset() if sampling.ignore_eos else limits.eos_token_ids
        self.banned = self.stops | self.ends if sampling.min_tokens else frozenset()
        if len(self.banned) >= limits.choices:
            raise InvalidRequestError(
                "stop_token_ids leave nothing to sample", field="stop_token_ids"
            )
        self.bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        if self.bad_words and len(self.bad_words.lasts | self.banned) >= limits.choices:
            raise InvalidRequestError("bad_words leave nothing to sample", field="bad_words")
        self.phase = Phase.WAITING
        self.announce: Announce | None = None
        self.blocks: list[int] = []
        self.hashes: list[int] = []
        self.cached_tokens = -1
        self.computed = 0
        self.logprob: TokenLogprob | None = None
        self.scores: list[TokenLogprob] | None = None if sampling.prompt_logprobs is None else []

    @property
    def last_position(self) -> int:
        """How many tokens can get KV at most: the last sampled one needs none."""
        return len(self.tokens) + self.left - 1

    @property
    def banned_now(self) -> frozenset[int]:
        """What the next token must not be."""
        early = self.banned if len(self.tokens) < self.least else frozenset()
        if self.bad_words is None:
            return early
        return early | self.bad_words.banned(self.tokens, self.prompt_length)

    def unscored(self, first: int, stop: int) -> range:
        """Return which of these positions tell how likely the prompt's next token was.

        Without those that have told before, as after a preemption.
        """
        if self.scores is None:
            return range(0)
        return range(max(first, len(self.scores)), min(stop, self.prompt_length - 1))

    def take(self, token: int) -> Finish | None:
        """Append a picked token; return how the request ends with it, if it does."""
        self.tokens.append(token)
        self.left -= 1
        if token in self.stops:
            return Finish(FinishReason.STOP, self.cached_tokens, token)
        if token in self.ends:
            return Finish(FinishReason.STOP, self.cached_tokens)
        return None if self.left else Finish(FinishReason.LENGTH, self.cached_tokens)


def check_sampling(sampling: Sampling, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """Raise `InvalidRequestError`, with its field, for token ids that can't be honoured.

    Such are outside of the vocabulary, or all that are allowed are banned by min_tokens or
    may be by bad_words.
    """
    for token_id in sampling.stop_token_ids:
        _check_token(token_id, vocab_size, "stop_token_ids")
    for token_id, _ in sampling.logit_bias:
        _check_token(token_id, vocab_size, "logit_bias")
    allowed = set(sampling.allowed_token_ids)
    for token_id in sampling.allowed_token_ids:
        _check_token(token_id, vocab_size, "allowed_token_ids")
    lasts = {sequence[-1] for sequence in sampling.bad_words}
    for sequence in sampling.bad_words:
        _check_token(min(sequence), vocab_size, "bad_words")
        _check_token(max(sequence), vocab_size, "bad_words")
    if not allowed:
        return
    if allowed <= lasts:
        raise InvalidRequestError(
            "allowed_token_ids has none that bad_words leave", field="allowed_token_ids"
        )
    ends = frozenset() if sampling.ignore_eos else eos_token_ids
    if sampling.min_tokens and allowed <= lasts.union(ends, sampling.stop_token_ids):
        raise InvalidRequestError(
            "allowed_token_ids has none that may come before min_tokens",
            field="allowed_token_ids",
        )


def refuse_prompt_logprobs(sampling: Sampling) -> None:
    """Raise `InvalidRequestError` where they are asked of an engine with half of a request."""
    if sampling.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs needs prefill and decode in one engine", field="prompt_logprobs"
        )


def _check_token(token_id: int, vocab_size: int, field: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(
            f"{field} has the token id {token_id}, outside of 0 to {vocab_size - 1}", field=field
        )


def _check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise InvalidRequestError("the prompt is empty", field="token_ids")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"the prompt has the token id {token_id}, outside of 0 to {vocab_size - 1}",
                field="token_ids",
            )


def _max_tokens(request: EngineRequest, first: int, longest: int) -> int:
    prompt, sampling = len(request.token_ids), request.sampling
    if prompt >= longest:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens, the context {longest}", field="token_ids"
        )
    max_tokens = longest - prompt if sampling.max_tokens is None else sampling.max_tokens
    if prompt + max_tokens > longest:
        raise ContextLengthError(
            f"{prompt} prompt tokens and {max_tokens} more do not fit the context of {longest}",
            field="max_tokens",
        )
    if max_tokens <= first:
        raise InvalidRequestError("max_tokens were sampled already", field="max_tokens")
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError("min_tokens must be 0 to max_tokens", field="min_tokens")
    return max_tokens
