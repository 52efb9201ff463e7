"""Typed clients of the multiplexed services: the mesh's own types in and out.

Each function takes the `Peer` to ask. All errors are `MeshError`s. What returns a call
returns an async context manager: leaving it cancels what still runs on the server.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, MeshError, ProtocolError
from kvmesh.rpc.calls import BatchCall, Call, ValueCall
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.specs import DECODE, DETOKENIZE, PREFILL, ROUTE, TOKENIZE
from kvmesh.types import (
    Completion,
    Context,
    Encoded,
    KvTicket,
    Leg,
    Plan,
    Prompt,
    Sampling,
    TextLogprob,
    TokenLogprob,
)
from kvmesh.wire import (
    LEG_TO_PROTO,
    context_to_proto,
    plan_from_proto,
    prompt_to_proto,
    sampling_to_proto,
    sequences_from_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from kvmesh.wire_logprobs import (
    logprobs_from_proto,
    logprobs_to_proto,
    text_logprobs_from_proto,
)


class TextPiece(NamedTuple):
    """Some text of a completion. `token_count`: tokens read so far, in all.

    `logprobs`: the tokens that the text is made of, where log probabilities were fed.
    """

    text: str
    token_count: int
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a router has to know of a request. Hashes are of `block_size` tokens.

    Requests of one `session` belong together; empty: of none. In the queue those with
    different `fair_key` share alike.
    """

    model: str
    prompt_tokens: int
    max_tokens: int
    block_hashes: Sequence[int]
    block_size: int
    excluded: Sequence[str] = ()
    session: str = ""
    fair_key: str = ""


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """A prompt's outcome. Without a ticket the answer is complete: see `completion`.

    `computing`: the ticket came first. Keep the call until its end then: it may fail yet.
    """

    ticket: KvTicket | None
    first_token_ids: Sequence[int]
    cached_tokens: int
    logprobs: Sequence[TokenLogprob] = ()
    computing: bool = False


async def encode(  # noqa: PLR0913 - one argument for each field of the start
    peer: Peer,
    prompt: Prompt,
    model: str,
    block_size: int,
    context: Context,
    clock: Clock,
    *,
    truncate_to: int = 0,
    bad_words: Sequence[str] = (),
) -> Encoded:
    """Render and encode a prompt. `block_size` 0: no hashes; `truncate_to` 0: all of it.

    `bad_words` are encoded with it, for `Sampling.bad_words`.
    """
    call = ValueCall(peer.stream(TOKENIZE), _encoded)
    start = call.request.starts.add(
        stream_id=call.stream_id, model=model, block_size=block_size, truncate_to=truncate_to
    )
    start.bad_words.extend(bad_words)
    context_to_proto(context, start.context, clock)
    prompt_to_proto(prompt, start)
    async with call:
        return await call.value


class TextCall(BatchCall[TextPiece]):
    """A completion on its way from token ids to text."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer.stream(DETOKENIZE), _text_piece)
        self.fed = 0
        """Tokens fed so far: the offset of the next one."""

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Send further token ids, perhaps with theirs. Ignored once the text has ended."""
        if self.stream.is_live(self.stream_id):
            delta = self.stream.outbox.next().deltas.add(
                stream_id=self.stream_id, offset=self.fed, token_ids=token_ids
            )
            if logprobs:
                logprobs_to_proto(logprobs, delta)
            self.fed += len(token_ids)

    def finish(self) -> None:
        """Say that no more tokens come: what is held back is flushed, then the end."""
        if self.stream.is_live(self.stream_id):
            self.stream.outbox.next().finishes.append(self.stream_id)


def detokenize(  # noqa: PLR0913 - one argument for each field of the start
    peer: Peer,
    model: str,
    context: Context,
    clock: Clock,
    *,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    keep_special: bool = False,
    min_tokens: int = 0,
) -> TextCall:
    """Start turning a completion into text."""
    call = TextCall(peer)
    start = call.request.starts.add(
        stream_id=call.stream_id,
        model=model,
        stop=stop,
        include_stop=include_stop,
        keep_special=keep_special,
        min_tokens=min_tokens,
    )
    context_to_proto(context, start.context, clock)
    return call


class PlanCall(ValueCall[Plan]):
    """A plan and the reservation it holds: leaving the context ends both."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer.stream(ROUTE), plan_from_proto)

    def prefilled(self, cached_tokens: int | None = None) -> None:
        """Say that the prompt is computed: the prefill work reserved for it is done.

        `cached_tokens`: how much of it had been cached, where that is known.
        """
        if self.stream.is_live(self.stream_id):
            self.stream.outbox.next().progress.add(
                stream_id=self.stream_id, prefilled=True, cached_tokens=cached_tokens
            )

    def generating(self) -> None:
        """Say that decode has generated a token: the workers have done their parts."""
        if self.stream.is_live(self.stream_id):
            self.stream.outbox.next().progress.add(stream_id=self.stream_id, generating=True)

    def failed(self, leg: Leg, *, timed_out: bool = False) -> None:
        """Say which part a worker failed, or had not done when the request's time was up."""
        if self.stream.is_live(self.stream_id):
            self.stream.outbox.next().progress.add(
                stream_id=self.stream_id, failed_leg=LEG_TO_PROTO[leg], timed_out=timed_out
            )


def route(peer: Peer, query: RouteQuery, context: Context, clock: Clock) -> PlanCall:
    """Ask for a plan; it comes as the call's `value`."""
    call = PlanCall(peer)
    start = call.request.starts.add(
        stream_id=call.stream_id,
        model=query.model,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        block_size=query.block_size,
        excluded_worker_ids=query.excluded,
        session_key=query.session,
        fair_key=query.fair_key,
    )
    start.block_hashes.extend(query.block_hashes)
    context_to_proto(context, start.context, clock)
    return call


class PrefillCall(ValueCall[PrefillAnswer]):
    """A prompt being computed.

    Whoever gets an answer with a ticket dispatches decode or calls `release_kv`. A
    ticket that comes when nobody waits for it any more goes to `orphan`.
    """

    def __init__(self, peer: Peer, orphan: Callable[[KvTicket], None]) -> None:
        self._orphan = orphan
        self._taken = False
        super().__init__(peer.stream(PREFILL), _prefill_answer)

    async def answer(self) -> PrefillAnswer:
        """Wait for the answer. Its ticket is the caller's from here on."""
        answer = await self.value
        self._taken = True
        return answer

    def item(self, item: Any) -> None:
        """Resolve the value, or pass an unwanted ticket on."""
        if not self.value.done():
            super().item(item)
        elif item.HasField("ticket"):
            self._orphan(ticket_from_proto(item.ticket))

    def leave(self) -> None:
        """Cancel the request, if it has not ended. A ticket may still be on its way."""
        value, taken, self._taken = self.value, self._taken, True
        if not value.done():
            value.cancel()
        elif not taken and not value.cancelled() and value.exception() is None:
            ticket = value.result().ticket
            if ticket is not None:
                self._orphan(ticket)
        self.stream.cancel(self.stream_id)


def prefill(
    peer: Peer,
    token_ids: Sequence[int],
    sampling: Sampling,
    context: Context,
    clock: Clock,
    *,
    orphan: Callable[[KvTicket], None],
) -> PrefillCall:
    """Start a prefill; what it came to is the call's `answer`, its end `completion`."""
    call = PrefillCall(peer, orphan)
    start = call.request.starts.add(stream_id=call.stream_id)
    start.token_ids.extend(token_ids)
    sampling_to_proto(sampling, start.sampling)
    context_to_proto(context, start.context, clock)
    return call


TokenSink = Callable[[Sequence[int], Sequence[TokenLogprob]], None]
"""Gets token ids, with log probabilities where these were asked for."""


class DecodeCall(Call):
    """A completion being generated.

    Tokens go to `sink` as they come and the end to `done`, in the stream's reader:
    neither may block or raise. `done` is called exactly once, after the last token;
    when the call is left, only then, once what the request held on the worker is free.
    `completion` resolves with it. `prompt_sink` gets the prompt's tokens but the first,
    where their log probabilities were asked for, before any other token.
    """

    def __init__(
        self,
        peer: Peer,
        sink: TokenSink,
        done: Callable[[Completion | MeshError], None] | None = None,
        prompt_sink: TokenSink | None = None,
    ) -> None:
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.received = 0
        """Tokens received so far."""
        self.cached_tokens: int | None = None
        """Prompt tokens that were cached; None: not said with the tokens so far."""
        self._sink = sink
        self._prompt_sink = prompt_sink
        self._done = done
        self._closed = False
        super().__init__(peer.stream(DECODE))

    def item(self, item: Any) -> None:
        """Pass tokens on, refusing a gap or a repetition."""
        if self._closed:
            return
        try:
            logprobs = logprobs_from_proto(item) if item.logprobs else ()
        except InvalidRequestError as error:
            self._refuse(error.message)
            return
        if item.prompt:
            if self._prompt_sink is not None:
                self._prompt_sink(item.token_ids, logprobs)
        elif item.offset != self.received:
            self._refuse(f"token {item.offset} came where {self.received} was due")
        else:
            if not self.received and item.HasField("cached_tokens"):
                self.cached_tokens = item.cached_tokens
            self.received += len(item.token_ids)
            self._sink(item.token_ids, logprobs)

    def end(self, outcome: Completion | MeshError) -> None:
        """Tell `done` and resolve `completion`; the first end stands."""
        if not self.completion.done():
            if isinstance(outcome, MeshError):
                self.completion.set_exception(outcome)
                self.completion.exception()  # read: `done` is told as well
            else:
                self.completion.set_result(outcome)
        done, self._done = self._done, None
        if done is not None:
            done(outcome)

    def leave(self) -> None:
        """Cancel the request, if it has not ended. No more tokens reach `sink`."""
        self._closed = True
        self.stream.cancel(self.stream_id)

    def _refuse(self, why: str) -> None:
        self.end(ProtocolError(why))
        self.leave()


def decode(  # noqa: PLR0913 - one argument for each field of the start
    peer: Peer,
    token_ids: Sequence[int],
    sampling: Sampling,
    context: Context,
    clock: Clock,
    *,
    ticket: KvTicket | None,
    sink: TokenSink,
    done: Callable[[Completion | MeshError], None] | None = None,
    prompt_sink: TokenSink | None = None,
    generated: Sequence[int] = (),
) -> DecodeCall:
    """Start a completion, from a ticket's KV or, without one, from the prompt.

    `generated` is how it began on a worker that was lost; only what follows goes to `sink`.
    """
    call = DecodeCall(peer, sink, done, prompt_sink)
    start = call.request.starts.add(stream_id=call.stream_id)
    start.token_ids.extend(token_ids)
    start.generated_token_ids.extend(generated)
    sampling_to_proto(sampling, start.sampling)
    if ticket is not None:
        ticket_to_proto(ticket, start.ticket)
    context_to_proto(context, start.context, clock)
    return call


def _encoded(message: Any) -> Encoded:
    bad_words = sequences_from_proto(message.bad_words) if message.bad_words else ()
    return Encoded(message.token_ids, message.block_hashes, bad_words)


def _text_piece(message: Any) -> TextPiece:
    logprobs = text_logprobs_from_proto(message) if message.logprobs else ()
    return TextPiece(message.text, message.token_count, logprobs)


def _prefill_answer(message: Any) -> PrefillAnswer:
    ticket = ticket_from_proto(message.ticket) if message.HasField("ticket") else None
    return PrefillAnswer(
        ticket,
        tuple(message.first_token_ids),
        message.cached_tokens,
        logprobs_from_proto(message),
        message.computing,
    )
