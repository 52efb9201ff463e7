"""The prompt at the beginning of its own answer."""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.types import (
    ChatPrompt,
    Completion,
    FinishReason,
    TextLogprob,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from services.frontend.answer import Answer, Piece
from services.frontend.run import Choice
from services.frontend.texts import Texts


class Echo:
    """Makes the first piece of a choice that has something of its prompt."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def piece(self, choice: Choice, answer: Answer | None) -> Piece:
        """Return what is wanted of the prompt: its text, its log probabilities, or both.

        They come with `answer`, whose own text is what follows. Where only the prompt is
        wanted, this piece is the choice's last. The text of a conversation is the message
        that the answer goes on with, if there is one.
        """
        request, source = choice.run.request, choice.source
        rows: Sequence[TokenLogprob] = ()
        if choice.sampling.prompt_logprobs is not None and answer is not None:
            rows = await choice.run.within(answer.prompt_logprobs())
        text, entries = await self._echoed(choice, rows) if request.echo else ("", ())
        told: tuple[TextLogprob, ...] = ()
        if choice.prompt_logprobs is not None:
            _, told = await self._scored(choice, rows, choice.prompt_logprobs, keep_special=True)
        if answer is not None:
            answer.shift = len(text)
        prompt_tokens = len(source.encoded.token_ids)
        completion = None
        if not request.generate:
            completion = Completion(FinishReason.LENGTH, Usage(prompt_tokens, 0))
        return Piece(text, 0, completion, choice.index, entries, prompt_tokens, told)

    async def _echoed(
        self, choice: Choice, rows: Sequence[TokenLogprob]
    ) -> tuple[str, tuple[TextLogprob, ...]]:
        """Return the prompt as text, with its log probabilities if these belong to it."""
        request, source = choice.run.request, choice.source
        keep = request.keep_special
        if choice.scores_echo:
            count = request.sampling.logprobs or 0
            return await self._scored(choice, rows, count, keep_special=keep)
        if isinstance(source.prompt, ChatPrompt):
            return _begun(source.prompt), ()
        if isinstance(source.prompt, TextPrompt) and request.truncate_to is None:
            return source.prompt.text, ()
        return await self._texts.decode(
            choice.run, choice.tokenizer, source.encoded.token_ids, keep_special=keep
        )

    async def _scored(
        self, choice: Choice, rows: Sequence[TokenLogprob], count: int, *, keep_special: bool
    ) -> tuple[str, tuple[TextLogprob, ...]]:
        """Return the prompt's text, and all its tokens with the `count` likeliest of each.

        `rows` are of all tokens but the first.
        """
        source = choice.source
        # Rows are of one length, so the first token, which nothing predicts, borrows one.
        given = [*(rows[:1] or [TokenLogprob(0.0)]), *rows]
        if len(given[0].top) > count:
            given = [replace(row, top=row.top[:count]) for row in given]
        text, entries = await self._texts.decode(
            choice.run,
            choice.tokenizer,
            source.encoded.token_ids,
            given,
            keep_special=keep_special,
        )
        if entries:
            first = entries[0]
            token = replace(first.token, logprob=None)
            entries = (replace(first, token=token, top=(), rank=0), *entries[1:])
        return text, entries


def _begun(chat: ChatPrompt) -> str:
    return chat.messages[-1].content if chat.continue_final_message else ""
