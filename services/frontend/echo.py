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
    """Makes the first piece of a choice that echoes its prompt."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def piece(self, choice: Choice, answer: Answer | None) -> Piece:
        """Return the prompt as text, with its log probabilities if these are asked for.

        They come with `answer`, whose own text is what follows. Where only the prompt is
        wanted, this piece is the choice's last. Of a conversation it is the message that the
        answer goes on with, if there is one.
        """
        request, source = choice.run.request, choice.source
        entries: tuple[TextLogprob, ...] = ()
        if choice.sampling.prompt_logprobs is not None and answer is not None:
            rows = await choice.run.within(answer.prompt_logprobs())
            text, entries = await self._decode(choice, rows)
        elif isinstance(source.prompt, ChatPrompt):
            text = _begun(source.prompt)
        elif isinstance(source.prompt, TextPrompt) and request.truncate_to is None:
            text = source.prompt.text
        else:
            text, _ = await self._decode(choice, None)
        if answer is not None:
            answer.shift = len(text)
        prompt_tokens = len(source.encoded.token_ids)
        completion = None
        if not request.generate:
            completion = Completion(FinishReason.LENGTH, Usage(prompt_tokens, 0))
        return Piece(text, 0, completion, choice.index, entries, prompt_tokens)

    async def _decode(
        self, choice: Choice, rows: Sequence[TokenLogprob] | None
    ) -> tuple[str, tuple[TextLogprob, ...]]:
        """Return the prompt's text, and with `rows`, of all tokens but the first, its tokens."""
        source = choice.source
        # Rows are of one length, so the first token, which nothing predicts, borrows one.
        given = [] if rows is None else [*(rows[:1] or [TokenLogprob(0.0)]), *rows]
        text, entries = await self._texts.decode(
            choice.run,
            source.tokenizer,
            source.encoded.token_ids,
            given,
            keep_special=choice.run.request.keep_special,
        )
        if entries:
            first = entries[0]
            unpredicted = replace(first, token=replace(first.token, logprob=None), top=())
            entries = (unpredicted, *entries[1:])
        return text, entries


def _begun(chat: ChatPrompt) -> str:
    return chat.messages[-1].content if chat.continue_final_message else ""
