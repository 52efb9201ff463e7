"""The life of a request: validate, tokenize, route, prefill, decode, detokenize, answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial

from kvmesh.clock import Clock
from kvmesh.errors import ContextLengthError, DeadlineError, MeshError, UnavailableError
from kvmesh.rpc import clients
from kvmesh.rpc.peer import Peer
from kvmesh.telemetry import Kind, Tracer
from kvmesh.types import ChatPrompt, Encoded, KvTicket
from services.frontend.answer import Answer, Piece
from services.frontend.config import LimitsConfig
from services.frontend.fleet import Fleet, Model
from services.frontend.generation import Generation
from services.frontend.metrics import FrontendMetrics, Step
from services.frontend.placement import Placement, Placer
from services.frontend.request import Request
from services.frontend.run import Run
from services.frontend.tickets import Tickets


class Pipeline:
    """Serves requests with the workers of a fleet. The only orchestrator of the mesh."""

    def __init__(
        self,
        fleet: Fleet,
        tickets: Tickets,
        metrics: FrontendMetrics,
        limits: LimitsConfig,
        *,
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._tickets = tickets
        self._metrics = metrics
        self._limits = limits
        self._tracer = tracer
        self._clock = clock
        self._placer = Placer(fleet, metrics, clock)

    async def generate(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Yield the answer as it comes; the last piece has the completion.

        Raises `MeshError`. Closing the generator, or cancelling whoever waits in it,
        cancels the work in every process at once, without waiting for them.
        """
        with self._observed(request) as run:
            model = self._fleet.model(request.model)
            encoded, tokenizer = await self._tokenize(run, model)
            check_length(request, model, len(encoded.token_ids))
            with self._detokenize(run, tokenizer, encoded) as answer:
                while answer.completion is None:
                    try:
                        with await self._placer.place(run, model, encoded) as placement:
                            ticket = await self._prefill(run, placement, encoded, answer)
                            with self._decode(run, placement, ticket, encoded, answer):
                                while answer.completion is None:
                                    piece = await answer.next()
                                    run.text_sent()
                                    yield piece
                    except MeshError as error:
                        run.retry(error, self._limits.attempts)

    @contextmanager
    def _observed(self, request: Request) -> Iterator[Run]:
        """Trace and count the request."""
        sampling = request.sampling
        span = self._tracer.span(
            f"{request.operation} {request.model}",
            request.traceparent,
            {"gen_ai.operation.name": request.operation, "kvmesh.request_id": request.id},
            kind=Kind.SERVER,
        )
        span.set("gen_ai.request.model", request.model)
        if sampling.max_tokens is not None:
            span.set("gen_ai.request.max_tokens", sampling.max_tokens)
        if sampling.temperature is not None:
            span.set("gen_ai.request.temperature", sampling.temperature)
        run = Run(request, span, self._metrics, self._clock)
        failure: BaseException | None = None
        with span:
            try:
                yield run
            except BaseException as error:
                failure = error
                raise
            finally:
                run.end(failure)

    async def _tokenize(self, run: Run, model: Model) -> tuple[Encoded, Peer]:
        """Encode the prompt; the tokenizer that did will do the text as well."""
        request = run.request
        lost: MeshError | None = None
        with run.span.child("tokenize") as span:
            for peer in self._fleet.tokenizers(model):
                encoding = clients.encode(
                    peer,
                    request.prompt,
                    model.name,
                    model.block_size,
                    run.context(span),
                    self._clock,
                )
                try:
                    encoded = await run.within(encoding)
                except UnavailableError as error:
                    self._metrics.retried(Step.TOKENIZE)
                    lost = error
                    continue
                count = len(encoded.token_ids)
                self._metrics.prompt_tokens += count
                span.set("kvmesh.prompt_tokens", count)
                return encoded, peer
        raise lost or UnavailableError(f"no tokenizer serves the model {model.name!r}")

    @contextmanager
    def _detokenize(self, run: Run, tokenizer: Peer, encoded: Encoded) -> Iterator[Answer]:
        """Open the text. It ends with the block, or with an error at the deadline."""
        request = run.request
        text = clients.detokenize(
            tokenizer,
            request.model,
            run.context(run.span),
            self._clock,
            stop=request.stop,
            include_stop=request.include_stop,
            keep_special=request.keep_special,
        )
        answer = Answer(text, request, len(encoded.token_ids), run.first_token)
        run.answer = answer
        timer = asyncio.get_running_loop().call_later(
            run.seconds_left, answer.interrupt, DeadlineError("the request's time is up")
        )
        try:
            yield answer
        finally:
            timer.cancel()
            text.leave()

    async def _prefill(
        self, run: Run, placement: Placement, encoded: Encoded, answer: Answer
    ) -> KvTicket | None:
        """Have the prompt computed elsewhere, if so planned; its KV waits at the ticket.

        The first tokens, where prefill's count, go to the text at once.
        """
        worker = placement.plan.prefill
        if worker is None:
            return None
        run.at(Step.PREFILL, placement.plan)
        with run.span.child("prefill", {"kvmesh.worker": worker.id}) as span:
            call = clients.prefill(
                self._fleet.peer(worker),
                encoded.token_ids,
                run.request.sampling,
                run.context(span),
                self._clock,
                orphan=partial(self._tickets.release, worker),
            )
            async with call:
                prefilled = await run.within(call.answer())
                ended = None if prefilled.ticket else await run.within(call.completion)
            span.set("kvmesh.cached_tokens", prefilled.cached_tokens)
        # No await from here on: the ticket in hand goes to decode at once.
        placement.prefilled()
        answer.cached_tokens = prefilled.cached_tokens
        if prefilled.first_token_ids:
            answer.feed(prefilled.first_token_ids)
        if ended is not None:
            answer.end(ended)
        return prefilled.ticket

    @contextmanager
    def _decode(
        self,
        run: Run,
        placement: Placement,
        ticket: KvTicket | None,
        encoded: Encoded,
        answer: Answer,
    ) -> Iterator[None]:
        """Generate for as long as the block runs, if prefill has not come to the end."""
        if answer.generated:
            yield
            return
        plan = placement.plan
        run.at(Step.DECODE, plan)
        give_back = None
        if ticket is not None and plan.prefill is not None:
            give_back = partial(self._tickets.release, plan.prefill, ticket)
        with run.span.child("decode", {"kvmesh.worker": plan.decode.id}) as span:
            generation = Generation(answer, placement, give_back)
            generation.start(
                lambda sink: clients.decode(
                    self._fleet.peer(plan.decode),
                    encoded.token_ids,
                    run.request.sampling,
                    run.context(span),
                    self._clock,
                    ticket=ticket,
                    sink=sink.tokens,
                    done=sink.done,
                )
            )
            try:
                yield
            finally:
                generation.leave()


def check_length(request: Request, model: Model, prompt_tokens: int) -> None:
    """Raise `ContextLengthError` if prompt and completion can't fit the model's context."""
    limit, wanted = model.context_length, request.sampling.max_tokens
    if not limit or prompt_tokens + (wanted or 1) <= limit:
        return
    prompt = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    if wanted is None or prompt_tokens >= limit:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens, which leaves no room to answer in the "
            f"context of {limit} tokens",
            field=prompt,
        )
    raise ContextLengthError(
        f"the prompt has {prompt_tokens} tokens: with max_tokens of {wanted} it exceeds the "
        f"context of {limit} tokens",
        field="max_tokens",
    )
