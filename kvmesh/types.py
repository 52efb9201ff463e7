"""The nouns of the mesh: small frozen values that every layer shares.

They are valid once built. JSON and protobuf are turned into these at the edge
(`kvmesh.wire`, `services/*/servicer.py`, the REST schemas) and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.errors import InvalidRequestError
from kvmesh.sampling import (
    SAMPLING_RANGES,
    check_allowed,
    check_bad_words,
    check_logit_bias,
    check_ranges,
)

LOGPROB_FLOOR = -9999.0
"""What an impossible token's log probability is given as: JSON has no infinity."""


class Role(StrEnum):
    """The five kinds of process. Values are wire and command-line format."""

    FRONTEND = "frontend"
    TOKENIZER = "tokenizer"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    """Where a process is in its life. Only `ready` ones get new work."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class FinishReason(StrEnum):
    """Why generation stopped by itself. Values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to pick tokens. None means the engine's default; 0 means zero.

    `max_tokens` None: as many as the context holds. Building one out of range raises
    `InvalidRequestError` with the field at fault: temperature >= 0, 0 < top_p <= 1,
    top_k >= 1 or -1 for all, 0 <= min_p <= 1, penalties in [-2, 2],
    repetition_penalty > 0, -2**63 <= seed < 2**63, 1 <= max_tokens < 2**32.

    `logit_bias` is pairs of a token id and what is added to its logit, in [-100, 100].
    `logprobs` None: no log probabilities; 0: the sampled token's; up to 20: also those of
    so many likeliest. `prompt_logprobs` asks the same of the prompt's tokens but the first.
    `allowed_token_ids`: the only tokens that may be sampled; empty: all. `bad_words`:
    sequences of token ids that the completion never has, none of them empty.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no engine could honour."""
        check_ranges({name: getattr(self, name) for name in SAMPLING_RANGES})
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                field="min_tokens",
            )
        if self.logit_bias:
            check_logit_bias(self.logit_bias)
        if self.allowed_token_ids:
            check_allowed(self.allowed_token_ids)
        if self.bad_words:
            check_bad_words(self.bad_words)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely one sampled token was: natural logarithms, at most 0.

    Of the model's own distribution, before temperature, penalties, biases and everything
    else that sampling does. Finite: nothing is below `LOGPROB_FLOOR`. `top` is the
    likeliest tokens and theirs, likeliest first; the sampled one need not be among them.
    `rank` is the sampled one's place among all tokens, from 1; 0: not known.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token as text, and how likely it was.

    `text` is UTF-8, perhaps a part of a character; empty where the text does not show the
    token. `logprob` is None for the first token of a prompt, which nothing predicts.
    """

    token_id: int
    text: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token of a text: `offset` is where its own text begins, in characters.

    `top` is the likeliest tokens at its position, likeliest first. `rank` is the token's
    place among all there, from 1; 0: not known.
    """

    token: TokenScore
    offset: int
    top: tuple[TokenScore, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, as billed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The natural end of a request at one stage.

    `stop` is the stop string or the stop token id that ended it; None for the model's
    own EOS. `finish_reason` None where nothing was generated (a plan, an encoding).
    """

    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What travels with a request through every stage.

    `deadline` is on the process's own `Clock.now()`; on the wire it is the time left.
    `traceparent` is W3C trace context, or empty. Smaller `priority` goes first.
    """

    request_id: str
    deadline: float | None = None
    traceparent: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt to be encoded as it is, with the tokenizer's special tokens (BOS) or not."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    `extra` is a JSON object of further fields, such as `tool_calls`; empty: none.
    """

    role: str
    content: str
    name: str = ""
    extra: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat template, or by `template`.

    `continue_final_message` leaves the last message open. `tools` is a JSON array and
    `template_kwargs` a JSON object of further variables; both are text, so that they
    arrive as they were written. Empty: none. `add_special_tokens`: the tokenizer adds its
    own beside those that the template writes.
    """

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: str = ""
    template_kwargs: str = ""
    template: str = ""
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is token ids already."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids, with the chained hashes of its full KV blocks.

    `bad_words` is what the words that were encoded with it are in token ids.
    """

    token_ids: Sequence[int]
    block_hashes: Sequence[int] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker is busy with right now.

    Blocks are KV blocks of the worker's own block size. `ticket_blocks` and
    `ticket_bytes` are held for KV tickets nobody has pulled yet; they are part of
    `used_blocks`. `received_bytes` counts KV pulled from other workers since start, and
    `received_seconds` the time that took, pull by pull.
    """

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    ticket_blocks: int = 0
    ticket_bytes: int = 0
    received_bytes: int = 0
    received_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KvTicket:
    """What prefill hands to decode: where a prompt's KV waits, and until when.

    Single use. `epoch` is the life of the worker that holds the blocks: a ticket
    from an earlier life is refused. `engine_params` belongs to the engine and is
    passed on unread. Times are Unix seconds. `first_token_ids` are what prefill
    sampled; decode goes on after them where the engine can, else they are dropped.
    """

    ticket_id: str
    worker_id: str
    epoch: str
    backend: str
    engine: str
    layout_fingerprint: str
    prompt_tokens: int
    block_count: int
    byte_count: int
    lease_expire_time: float
    first_token_ids: tuple[int, ...] = ()
    engine_params: bytes = b""


@dataclass(frozen=True, slots=True)
class Member:
    """One process as the others see it, in whatever registry.

    `id` is stable over restarts on the same host and port, `epoch` is new with each
    start. Addresses are `host:port`. Fields that a role does not have are empty or 0.
    """

    id: str
    role: Role
    epoch: str
    address: str
    state: State = State.STARTING
    model: str = ""
    metrics_address: str = ""
    http_address: str = ""
    engine: str = ""
    block_size: int = 0
    total_blocks: int = 0
    context_length: int = 0
    layout_fingerprint: str = ""
    pid: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as a plan names it: enough to reach exactly this life of it."""

    id: str
    epoch: str
    address: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The router's decision on one request. `prefill` None: decode prefills itself.

    `why` is for people; `reason` says in one word why the prompt is computed there.
    `waited` is in seconds, in the router's queue.
    """

    decode: Worker
    prefill: Worker | None
    expected_cached_tokens: int
    why: str
    policy: str = ""
    reason: str = ""
    waited: float = 0.0


class Leg(StrEnum):
    """A part of a request, by who does it: one of the plan's workers, or both together."""

    PREFILL = "prefill"
    DECODE = "decode"
    HANDOFF = "handoff"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full KV blocks that became reusable; the mesh's chained hashes, prefix first."""

    block_hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """KV blocks that were evicted."""

    block_hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The whole prefix cache was dropped."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All KV blocks a worker has cached; what was known of it before is void."""

    block_hashes: Sequence[int]


WorkerEvent = CacheSnapshot | KvEvent | Load


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """Some events of one life of a worker. `sequence` counts from 1 on each watch."""

    worker_id: str
    epoch: str
    sequence: int
    events: Sequence[WorkerEvent]
