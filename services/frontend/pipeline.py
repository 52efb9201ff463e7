"""The life of a request: validate, tokenize, route, prefill, decode, detokenize, answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial

from kvmesh.clock import Clock
from kvmesh.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    MeshError,
    UnavailableError,
)
from kvmesh.rpc import clients
from kvmesh.rpc.peer import Peer
from kvmesh.telemetry import Span, Tracer
from kvmesh.types import Completion, Encoded
from services.frontend.answer import Answer, Piece
from services.frontend.config import LimitsConfig
from services.frontend.echo import Echo
from services.frontend.explanation import Explanation
from services.frontend.fleet import Fleet, Model
from services.frontend.generation import Generation
from services.frontend.merge import merged
from services.frontend.metrics import FrontendMetrics, Step
from services.frontend.placement import Placement, Placer
from services.frontend.request import Request
from services.frontend.run import Choice, Run
from services.frontend.spans import described
from services.frontend.texts import Texts
from services.frontend.tickets import Handover, Tickets

Begun = AbstractAsyncContextManager[tuple[Model, list[Choice]]]
"""Choices whose prompts are encoded, for as long as they are made."""


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
        self._texts = Texts(fleet, metrics, clock)
        self._echo = Echo(self._texts)

    def generate(
        self, request: Request, explanation: Explanation | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the choices' text as it comes; each choice's last piece has its completion.

        `explanation` is told where each choice runs, before its first piece comes.
        The request has passed `check_limits`. Raises `MeshError`, for one choice that fails
        as for all. Closing the generator, or cancelling whoever waits in it, cancels the
        work in every process at once, without waiting for them.
        """
        begun = self._begun(request, explanation)
        # One choice, as nearly all requests have, is read without anything in between.
        return self._answer(begun) if request.choices == 1 else self._answers(begun)

    async def tokenize(self, request: Request) -> list[Encoded]:
        """Return the request's prompts as token ids. Raises `MeshError`."""
        with self._traced("tokenize", request) as span:
            run = Run(request, span, self._metrics, self._clock)
            sources = await self._texts.encode(run, self._fleet.model(request.model))
            return [source.encoded for source in sources]

    async def detokenize(self, request: Request, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Raises `MeshError`."""
        with self._traced("detokenize", request) as span:
            run = Run(request, span, self._metrics, self._clock)
            lost: MeshError | None = None
            for tokenizer in self._fleet.tokenizers(self._fleet.model(request.model)):
                try:
                    text, _ = await self._texts.decode(run, tokenizer, token_ids, keep_special=True)
                except UnavailableError as error:
                    lost = error
                    continue
                except EngineError:  # here the ids are the caller's
                    raise InvalidRequestError(
                        "a token id is outside the model's vocabulary", field="tokens"
                    ) from None
                return text
            raise lost or UnavailableError("no tokenizer is left")

    def context_length(self, model: str) -> int:
        """Return the longest prompt plus completion, in tokens; 0: not known."""
        return self._fleet.model(model).context_length

    @asynccontextmanager
    async def _begun(
        self, request: Request, explanation: Explanation | None
    ) -> AsyncIterator[tuple[Model, list[Choice]]]:
        """Trace and count the request; yield its choices once all prompts are encoded."""
        with self._observed(request, explanation) as run:
            model = self._fleet.model(request.model)
            sources = await self._texts.encode(run, model)
            for source in sources:
                check_length(request, model, len(source.encoded.token_ids))
            run.choices = [
                Choice(run, index, sources[index // request.n]) for index in range(request.choices)
            ]
            yield model, run.choices

    async def _answers(self, begun: Begun) -> AsyncGenerator[Piece, None]:
        """Yield several choices, made side by side."""
        async with begun as (model, choices):
            answers = [self._answer(nullcontext((model, [choice]))) for choice in choices]
            async with aclosing(merged(answers)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _answer(self, begun: Begun) -> AsyncGenerator[Piece, None]:
        """Yield one choice, from as many attempts as it takes."""
        async with begun as (model, (choice,)):
            if not choice.needs_engine:
                yield choice.sent(await self._echo.piece(choice, None))
                return
            with self._detokenize(choice) as answer:
                while choice.completion is None:
                    try:
                        with await self._placer.place(choice, model) as placement:
                            handover = await self._prefill(choice, placement, answer)
                            with self._decode(choice, placement, handover, answer):
                                if not choice.echoed:
                                    first = await self._echo.piece(choice, answer)
                                    choice.echoed = True
                                    yield choice.sent(first)
                                while choice.completion is None:
                                    try:
                                        piece = await answer.next()
                                    except UnavailableError as error:
                                        self._reopen(choice, model, error)
                                    else:
                                        yield choice.sent(piece)
                    except MeshError as error:
                        if answer.lost and isinstance(error, UnavailableError):
                            self._reopen(choice, model, error)
                        else:
                            choice.retry(error, self._limits.attempts)

    @contextmanager
    def _observed(self, request: Request, explanation: Explanation | None) -> Iterator[Run]:
        """Trace and count the request."""
        with self._traced(request.operation, request) as span:
            run = Run(request, span, self._metrics, self._clock, explanation)
            failure: BaseException | None = None
            try:
                yield run
            except BaseException as error:
                failure = error
                raise
            finally:
                run.end(failure)

    @contextmanager
    def _traced(self, operation: str, request: Request) -> Iterator[Span]:
        model = self._metrics.model(request.model)
        span = self._tracer.span(f"{operation} {model}", request.traceparent)
        if span.recording:
            for name, value in described(request, operation, model).items():
                span.set(name, value)
        with span:
            yield span

    @contextmanager
    def _detokenize(self, choice: Choice) -> Iterator[Answer]:
        """Open the text. It ends with the block, or with an error at the deadline."""
        run, request = choice.run, choice.run.request
        text = self._text(choice, choice.source.tokenizer)
        prompt_tokens = len(choice.source.encoded.token_ids)
        answer = Answer(text, request, prompt_tokens, choice.first_token, choice.index)
        choice.answer = answer
        timer = asyncio.get_running_loop().call_later(
            run.seconds_left, answer.interrupt, DeadlineError("the request's time is up")
        )
        try:
            yield answer
        finally:
            timer.cancel()
            answer.leave()

    def _text(self, choice: Choice, tokenizer: Peer) -> clients.TextCall:
        run, request = choice.run, choice.run.request
        return clients.detokenize(
            tokenizer,
            request.model,
            run.context(run.span),
            self._clock,
            stop=request.stop,
            include_stop=request.include_stop,
            keep_special=request.keep_special,
            min_tokens=request.sampling.min_tokens,
        )

    def _reopen(self, choice: Choice, model: Model, error: UnavailableError) -> None:
        """Go on with another tokenizer, while tokens are generated; raise where that's no help."""
        answer = choice.answer
        if answer is None or not answer.lost or choice.tokenizer in choice.lost:
            raise error  # it was the generation that failed, or nobody is left
        choice.lose_tokenizer(error, self._limits.attempts)
        for tokenizer in self._fleet.tokenizers(model):
            if tokenizer not in choice.lost:
                choice.tokenizer = tokenizer
                answer.reopen(self._text(choice, tokenizer))
                return
        raise error

    async def _prefill(
        self, choice: Choice, placement: Placement, answer: Answer
    ) -> Handover | None:
        """Have the prompt computed elsewhere, if so planned; its KV waits at the ticket, or will.

        The first tokens, where prefill's count, go to the text at once.
        """
        worker = placement.plan.prefill
        if worker is None:
            return None
        run = choice.run
        choice.at(Step.PREFILL, placement.plan)
        with run.span.child("prefill", {"kvmesh.worker": worker.id}) as span:
            call = clients.prefill(
                self._fleet.peer(worker),
                choice.source.encoded.token_ids,
                choice.sampling,
                run.context(span),
                self._clock,
                orphan=partial(self._tickets.release, worker),
            )
            with ExitStack() as leaving:
                leaving.callback(call.leave)
                prefilled = await run.within(call.answer())
                ended = None if prefilled.ticket else await run.within(call.completion)
                if prefilled.computing:
                    leaving.pop_all()
            span.set("kvmesh.cached_tokens", prefilled.cached_tokens)
        # No await from here on: the ticket in hand goes to decode at once.
        if not prefilled.computing:
            placement.prefilled(prefilled.cached_tokens)
        answer.cached_tokens = prefilled.cached_tokens
        if prefilled.first_token_ids:
            answer.feed(prefilled.first_token_ids, prefilled.logprobs)
        if ended is not None:
            answer.end(ended)
        if prefilled.ticket is None:
            return None
        return Handover(worker, prefilled.ticket, call if prefilled.computing else None)

    @contextmanager
    def _decode(
        self, choice: Choice, placement: Placement, handover: Handover | None, answer: Answer
    ) -> Iterator[None]:
        """Generate for as long as the block runs, if prefill has not come to the end."""
        if answer.generated:
            yield
            return
        run, plan = choice.run, placement.plan
        choice.at(Step.DECODE, plan)
        ticket = None if handover is None else handover.ticket
        give_back = None if handover is None else partial(self._tickets.give_back, handover)
        with run.span.child("decode", {"kvmesh.worker": plan.decode.id}) as span:
            generation = Generation(answer, placement, give_back)
            with ExitStack() as leaving:
                if handover is not None and handover.computing is not None:
                    leaving.callback(handover.computing.leave)
                    _watch(choice, placement, handover.computing, generation)
                leaving.callback(generation.leave)
                generation.start(
                    lambda sink: clients.decode(
                        self._fleet.peer(plan.decode),
                        choice.source.encoded.token_ids,
                        choice.sampling,
                        run.context(span),
                        self._clock,
                        ticket=ticket,
                        generated=answer.token_ids if ticket is None else (),
                        sink=sink.tokens,
                        done=sink.done,
                        prompt_sink=answer.feed_prompt,
                    )
                )
                yield


def _watch(
    choice: Choice, placement: Placement, computing: clients.PrefillCall, generation: Generation
) -> None:
    """Tell of the end of a prefill beside decode; if it fails, the generation does."""

    def ended(completion: asyncio.Future[Completion]) -> None:
        error = completion.exception()
        if error is None:
            placement.prefilled(choice.answer.cached_tokens if choice.answer else None)
        elif isinstance(error, MeshError) and generation.fail(error):
            choice.at(Step.PREFILL, placement.plan)

    computing.completion.add_done_callback(ended)


def check_length(request: Request, model: Model, prompt_tokens: int) -> None:
    """Raise `ContextLengthError` if prompt and completion can't fit the model's context."""
    limit, wanted = model.context_length, request.sampling.max_tokens
    least = (wanted or 1) if request.generate else 0
    if not limit or prompt_tokens + least <= limit:
        return
    prompt = "messages" if request.operation == "chat" else "prompt"
    if not request.generate:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens, more than the context of {limit} tokens",
            field=prompt,
        )
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
