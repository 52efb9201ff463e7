"""Prompts into token ids and back, by whichever tokenizer can be reached."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvmesh.clock import Clock
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc import clients
from kvmesh.rpc.peer import Peer
from kvmesh.types import Prompt, TextLogprob, TokenLogprob
from services.frontend.fleet import Fleet, Model
from services.frontend.metrics import FrontendMetrics, Step
from services.frontend.run import Run, Source


class Texts:
    """Asks the tokenizers of a fleet. Everything is done within the request's time."""

    def __init__(self, fleet: Fleet, metrics: FrontendMetrics, clock: Clock) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock

    async def encode(self, run: Run, model: Model) -> list[Source]:
        """Return the request's prompts, encoded; when one can't be, none is.

        Each has the request's bad words, which go with the first.
        """
        first, *others = run.request.prompts
        words = run.request.bad_words
        if not others:
            return [await self._encode(run, model, first, words)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._encode(run, model, first, words)),
                    *(group.create_task(self._encode(run, model, each)) for each in others),
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        sources = [task.result() for task in tasks]
        found = sources[0].encoded.bad_words
        return [replace(each, encoded=replace(each.encoded, bad_words=found)) for each in sources]

    async def decode(
        self,
        run: Run,
        tokenizer: Peer,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        *,
        keep_special: bool,
    ) -> tuple[str, tuple[TextLogprob, ...]]:
        """Return the text of some tokens, and the tokens of the text where theirs are given."""
        text = clients.detokenize(
            tokenizer,
            run.request.model,
            run.context(run.span),
            self._clock,
            keep_special=keep_special,
        )
        async with text:
            text.feed(token_ids, logprobs)
            text.finish()
            texts: list[str] = []
            entries: list[TextLogprob] = []
            end = None
            while end is None:
                pieces, end = await run.within(text.next())
                texts.extend(piece.text for piece in pieces)
                entries.extend(entry for piece in pieces for entry in piece.logprobs)
        return "".join(texts), tuple(entries)

    async def _encode(
        self, run: Run, model: Model, prompt: Prompt, bad_words: Sequence[str] = ()
    ) -> Source:
        lost: MeshError | None = None
        with run.span.child("tokenize") as span:
            encode = partial(
                clients.encode,
                prompt=prompt,
                model=model.name,
                block_size=model.block_size,
                context=run.context(span),
                clock=self._clock,
                truncate_to=_truncate_to(run, model),
                bad_words=bad_words,
            )
            for peer in self._fleet.tokenizers(model):
                try:
                    encoded = await run.within(encode(peer))
                except UnavailableError as error:
                    self._metrics.retried(Step.TOKENIZE)
                    lost = error
                    continue
                count = len(encoded.token_ids)
                span.set("kvmesh.prompt_tokens", count)
                return Source(prompt, encoded, peer)
        raise lost or UnavailableError(f"no tokenizer serves the model {model.name!r}")


def _truncate_to(run: Run, model: Model) -> int:
    wanted, request = run.request.truncate_to, run.request
    if wanted != -1:
        return wanted or 0
    completion = (request.sampling.max_tokens or 1) if request.generate else 0
    return max(1, model.context_length - completion) if model.context_length else 0
