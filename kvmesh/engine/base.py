"""The contract between the mesh and an engine.

`AsyncEngine` is what every engine is. What only some can do is a further small
protocol, found with `isinstance`: an engine either has the whole of it or none.
One suite, `tests/contract/test_engine.py`, runs on every implementation.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvmesh.types import FinishReason, KvEvent, KvTicket, Load, Role, Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class Seat:
    """Whose engine this is: `worker_id` and this life of it, and what it is for.

    `model` is a Hugging Face folder, `name` what the mesh calls the model.
    """

    worker_id: str
    epoch: str
    role: Role
    model: Path
    name: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself once it is ready to serve.

    `block_size` is in tokens, `total_blocks` in KV blocks. `layout_fingerprint` digests
    everything two engines must share before KV may move between them; empty when it
    has no hand-off. `continues_first_token`: decode goes on after the tokens that
    prefill sampled, so they are streamed at once; else they are dropped.
    `concurrent_handoff`: its tickets come before the KV, see `ConcurrentPrefillEngine`.
    """

    engine: str
    model: str
    context_length: int
    vocab_size: int
    block_size: int
    total_blocks: int
    layout_fingerprint: str = ""
    continues_first_token: bool = False
    concurrent_handoff: bool = False


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as an engine sees it: token ids in, nothing about text.

    `request_id` is unique in the process. Smaller `priority` goes first.
    `traceparent` is W3C trace context, or empty. `generated` is how the completion began, on
    an engine that was lost: what comes now goes on from there, and is what would have come
    there. All of `sampling` counts these tokens, `max_tokens` too; no step repeats them.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    priority: int = 0
    traceparent: str = ""
    generated: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The natural end of a request. `stop_token_id` is the token that ended it."""

    reason: FinishReason
    cached_tokens: int = 0
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one or more engine steps gave one request: new token ids, in order.

    The terminal step has `finish`; it may carry tokens too. A token that ended the
    request (EOS or a stop token) is in `token_ids`, and counted. `logprobs` has one
    entry for each token where the request asks for them, all with as many `top`.
    `prompt_logprobs`, where asked for, comes once, before or with the first token: one
    entry for each token of the prompt but the first, which nothing predicts.
    `cached_tokens` of the prompt are in the first step at the latest, so that they are
    known too when somebody else ends the request.
    """

    token_ids: Sequence[int]
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The outcome of a prefill.

    Exactly one of `ticket` and `finish` is set: `finish` when prefill itself sampled
    the end (EOS, a stop token, max_tokens=1), and then `first_token_ids` is the whole
    answer. With a concurrent hand-off there is always a ticket, and never a token.
    `logprobs` are of the first tokens, as in `Step`.
    """

    first_token_ids: Sequence[int]
    cached_tokens: int
    ticket: KvTicket | None = None
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprob] | None = None


@runtime_checkable
class AsyncEngine(Protocol):
    """An inference engine for one model."""

    async def start(self) -> EngineInfo:
        """Load the model. Ready to serve when it returns. Raises `EngineError`."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[Step]:
        """Prefill and decode `request`; yields steps, exactly one terminal one, last.

        Closing the iterator, or cancelling the task in it, frees all that the request
        held. Raises `InvalidRequestError` before any work where the request can't be
        run, `EngineError` when the engine fails; other requests are not touched.
        """
        ...

    def load(self) -> Load:
        """Return what the engine is busy with now. Never blocks."""
        ...

    def check(self) -> None:
        """Raise `EngineError` if the engine can serve no more. Never blocks."""
        ...

    async def aclose(self) -> None:
        """Stop, failing what still runs. Idempotent, safe after a failed start."""
        ...


@runtime_checkable
class PrefillEngine(Protocol):
    """Can leave a prompt's KV to be pulled by another engine."""

    async def prefill(self, request: EngineRequest) -> Prefilled:
        """Run one forward pass over the prompt and hold its KV under a lease.

        Cancelling it frees all. The lease ends when the blocks were pulled, by
        `release`, or at the ticket's `lease_expire_time`.
        """
        ...

    async def release(self, ticket_id: str) -> bool:
        """Free the blocks of a ticket. False if it is not held; never raises for that."""
        ...


Announce = Callable[[KvTicket, int], None]
"""Gets a prompt's ticket, and how many of its tokens are cached, in the event loop."""


@runtime_checkable
class ConcurrentPrefillEngine(Protocol):
    """Can let decode begin beside prefill: it makes room, and waits for KV still computed."""

    async def prefill_announced(self, request: EngineRequest, announce: Announce) -> Prefilled:
        """Run a prefill whose ticket comes first, and return once the prompt is computed.

        `announce` is called as soon as `resume` may be called with the ticket; at most once.
        The ticket has no first token: decode samples it. Until this returns, its lease ends
        with it: by an error, by cancelling it, and by `release`, which fails it. What waits
        in `resume` then fails with `TicketError` or `TransferError`.
        """
        ...


@runtime_checkable
class ResumeEngine(Protocol):
    """Can go on from KV that another engine left."""

    def resume(self, request: EngineRequest, ticket: KvTicket) -> AsyncIterator[Step]:
        """Pull the ticket's blocks, then decode; yields as `generate` does.

        `request` is the same prompt and sampling. Where the engine continues after the
        first token, the ticket's tokens count towards max_tokens but are not yielded. It
        waits for a ticket that came before its KV.
        Raises `TicketError` before any block moves when the ticket can't be honoured,
        `TransferError` when the pull failed. Closing waits for a pull in flight to end.
        """
        ...


@runtime_checkable
class KvEventSource(Protocol):
    """Tells which prefixes it has cached, in the mesh's own block hashes."""

    def snapshot(self) -> Sequence[int]:
        """Return all cached block hashes now, a parent before its children."""
        ...

    def subscribe(self, sink: Callable[[KvEvent], None]) -> Callable[[], None]:
        """Call `sink` in the event loop with every later change, in order.

        Returns a function that ends it. Taken in the same loop turn, `snapshot` and
        `subscribe` miss nothing and repeat nothing.
        """
        ...


StepSink = Callable[[Step | Exception], None]
"""Gets one request's steps as the engine makes them; an exception is terminal."""


@runtime_checkable
class StepEngine(Protocol):
    """Works in steps and can hand them over without a task per request.

    What `generate` and `resume` yield goes to `sink` instead, called in the event loop
    from inside the engine's step; it must not block or raise. The cost of waking a
    task for each token is saved (see `bench/`).
    """

    def submit(self, request: EngineRequest, ticket: KvTicket | None, sink: StepSink) -> None:
        """Start a request. Raises what `generate` and `resume` raise before work."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Free all that the request held; its sink is not called again.

        False if it has ended already.
        """
        ...
