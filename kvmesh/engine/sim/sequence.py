"""One request inside the simulated engine, and what may become one."""

import random
from collections.abc import Sequence
from enum import Enum, auto

from kvmesh.engine.base import EngineRequest, Finish, StepSink
from kvmesh.engine.sim.config import SimConfig
from kvmesh.errors import ContextLengthError, InvalidRequestError
from kvmesh.types import FinishReason, KvTicket


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


class SimSequence:
    """A request's tokens, the blocks with their KV, and where its next word goes.

    `tokens` are prompt and completion, the first `computed` have KV. `hashes` name its full
    blocks, `base` digests those that are full. `start` is the byte where the current
    block begins; `slot` is the next word, `end` the first word behind the block. No token
    of `banned` is picked before there are `least` tokens. `special`: picking one takes more
    than the digest. `sink` is None once nobody listens. Bigger `key` goes first.
    """

    __slots__ = (
        "banned",
        "base",
        "blocks",
        "cached_tokens",
        "computed",
        "digest",
        "end",
        "hashes",
        "key",
        "kind",
        "least",
        "left",
        "mix",
        "phase",
        "prompt_length",
        "request",
        "sink",
        "slot",
        "special",
        "start",
        "stops",
        "ticket",
        "tokens",
    )

    def __init__(
        self, request: EngineRequest, kind: Kind, first: Sequence[int], sink: StepSink
    ) -> None:
        self.request = request
        self.kind = kind
        self.key = (-request.priority, 0)
        self.sink: StepSink | None = sink
        self.ticket: KvTicket | None = None
        self.tokens = [*request.token_ids, *first]
        self.prompt_length = len(request.token_ids)
        self.least = self.prompt_length + request.sampling.min_tokens
        self.stops: frozenset[int] = frozenset(request.sampling.stop_token_ids)
        self.left = 0
        self.special = False
        self.banned: frozenset[int] = frozenset()
        self.mix = 0
        self.phase = Phase.WAITING
        self.blocks: list[int] = []
        self.hashes: list[int] = []
        self.cached_tokens = -1
        self.computed = 0
        self.base = self.digest = 0
        self.start = self.slot = self.end = 0

    @property
    def last_position(self) -> int:
        """How many tokens can get KV at most: the last sampled one needs none."""
        return len(self.tokens) + self.left - 1

    def finish(self, token: int, eos_token_id: int) -> Finish | None:
        """Return how the request ends with its newest token, if it does."""
        if token in self.stops:
            return Finish(FinishReason.STOP, self.cached_tokens, token)
        if token == eos_token_id and not self.request.sampling.ignore_eos:
            return Finish(FinishReason.STOP, self.cached_tokens)
        return None if self.left else Finish(FinishReason.LENGTH, self.cached_tokens)


def build(
    config: SimConfig,
    request: EngineRequest,
    kind: Kind,
    *,
    ticket: KvTicket | None,
    sink: StepSink,
    rng: random.Random,
) -> SimSequence:
    """Return a valid sequence for a request.

    Raises `InvalidRequestError`, with its field, for what this engine can never run.
    """
    first = ticket.first_token_ids if ticket is not None else ()
    _check_tokens(config, request.token_ids)
    max_tokens = _max_tokens(config, request, len(first))
    sequence = SimSequence(request, kind, first, sink)
    sequence.ticket = ticket
    sequence.left = max_tokens - len(first)
    if request.sampling.min_tokens:
        sequence.banned = _banned(config, request)
    samples_eos = config.eos_probability > 0 or config.sample_from <= config.eos_token_id
    sequence.special = bool(samples_eos or sequence.stops or sequence.banned)
    sequence.mix = _salt(request, rng)
    return sequence


def _check_tokens(config: SimConfig, token_ids: Sequence[int]) -> None:
    if not token_ids:
        raise InvalidRequestError("the prompt is empty", field="token_ids")
    if min(token_ids) < 0 or max(token_ids) >= config.vocab_size:
        raise InvalidRequestError(
            f"the prompt has a token id outside of 0 to {config.vocab_size - 1}", field="token_ids"
        )


def _max_tokens(config: SimConfig, request: EngineRequest, first: int) -> int:
    prompt, sampling, longest = len(request.token_ids), request.sampling, config.longest
    if prompt >= longest:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens, the context {longest}", field="token_ids"
        )
    max_tokens = longest - prompt if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", field="max_tokens")
    if prompt + max_tokens > longest:
        raise ContextLengthError(
            f"{prompt} prompt tokens and {max_tokens} more do not fit the context of {longest}",
            field="max_tokens",
        )
    if max_tokens <= first:
        raise InvalidRequestError("prefill has sampled max_tokens already", field="max_tokens")
    if not 0 <= sampling.min_tokens <= max_tokens:
        raise InvalidRequestError("min_tokens must be 0 to max_tokens", field="min_tokens")
    return max_tokens


def _banned(config: SimConfig, request: EngineRequest) -> frozenset[int]:
    """Return what must not be sampled before min_tokens: all that would end the request."""
    banned = frozenset(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        banned |= {config.eos_token_id}
    if len(banned) >= config.vocab_size - config.sample_from:
        raise InvalidRequestError("stop_token_ids leave nothing to sample", field="stop_token_ids")
    return banned


def _salt(request: EngineRequest, rng: random.Random) -> int:
    """Return the request's random stream: 0 for greedy, which is also the default."""
    if not request.sampling.temperature:
        return 0
    seed = request.sampling.seed
    return (rng.getrandbits(63) if seed is None else seed) + 1
