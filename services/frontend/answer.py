"""One completion on its way: token ids in from the engines, text out to the caller."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvmesh.errors import MeshError, ProtocolError
from kvmesh.rpc.clients import TextCall
from kvmesh.types import Completion, FinishReason, TextLogprob, TokenLogprob, Usage
from services.frontend.request import Request


@dataclass(slots=True)  # not frozen: one for nearly every token, and that costs thrice as much
class Piece:
    """What comes next of choice `index`. Its last piece, and only that, has the completion.

    `text` may be empty in the last one, and where `logprobs` or `prompt_logprobs` is not.
    `token_count`: tokens of this choice read so far, in all. `prompt_tokens`: those of its
    prompt. `prompt_logprobs`, of all the prompt's tokens, come once and first.
    """

    text: str
    token_count: int
    completion: Completion | None = None
    index: int = 0
    logprobs: tuple[TextLogprob, ...] = ()
    prompt_tokens: int = 0
    prompt_logprobs: tuple[TextLogprob, ...] = ()


@dataclass(slots=True)
class _Sent:
    """How much of a text has been read: characters, and tokens with log probabilities."""

    chars: int = 0
    entries: int = 0

    def add(self, text: str, entries: tuple[TextLogprob, ...]) -> None:
        self.chars += len(text)
        self.entries += len(entries)

    def cut(
        self, text: str, entries: tuple[TextLogprob, ...]
    ) -> tuple[str, tuple[TextLogprob, ...]]:
        """Return what is beyond this much of what comes next; the rest is used up."""
        chars, known = min(self.chars, len(text)), min(self.entries, len(entries))
        self.chars -= chars
        self.entries -= known
        return text[chars:], entries[known:]


class Answer:
    """Joins what generates the tokens of a choice and what turns them into text.

    `feed`, `feed_prompt` and `end` are called by streams' readers: they don't block and
    don't raise. A generation that fails makes `next` raise; another one may then go on
    from the tokens that came. When the text is `lost`, tokens are kept for the next one.
    """

    def __init__(
        self,
        text: TextCall,
        request: Request,
        prompt_tokens: int,
        first: Callable[[], None],
        index: int = 0,
    ) -> None:
        self.token_ids: list[int] = []
        """What was generated so far, with what the text does not show."""
        self.cached_tokens: int | None = None
        """Prompt tokens that a remote prefill found cached; None: decode will say."""
        self.completion: Completion | None = None
        """How it all ended, once the last piece is there."""
        self.shift = 0
        """Characters before this text in the choice's, where a prompt is echoed."""
        self._text = text
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._prompt_rows: list[TokenLogprob] = []
        self._first = first
        self._generated: Completion | None = None
        # The token that ends generation has no text of its own: hold back what may be it.
        self._hides_last = request.keep_special and not request.include_stop
        self._hidden = frozenset(() if request.include_stop else request.sampling.stop_token_ids)
        self._held: tuple[list[int], list[TokenLogprob]] = ([], [])
        self._rows: list[TokenLogprob] = []
        self._missed: MeshError | None = None  # what no text was there to be interrupted by
        self._sent = _Sent()
        self._skip: _Sent | None = None

    @property
    def received(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids)

    @property
    def generated(self) -> bool:
        """Whether all tokens are there."""
        return self._generated is not None

    @property
    def open(self) -> bool:
        """Whether the text can still take tokens; they are kept where it is lost."""
        return self._text.stream.is_live(self._text.stream_id) or self.lost

    @property
    def lost(self) -> bool:
        """Whether the text's stream has broken: `reopen` it."""
        return self._text.stream.broken is not None

    def reopen(self, text: TextCall) -> None:
        """Go on with another text, of all tokens so far. What was read of it is left out."""
        self._text.leave()
        self._text = text
        self._skip = replace(self._sent)
        self._held = ([], [])
        self._pass_on(self.token_ids, self._rows)
        missed, self._missed = self._missed, None
        if self._generated is not None:
            self._finish(self._generated)
        elif missed is not None:
            text.interrupt(missed)

    def leave(self) -> None:
        """Cancel the text, if it has not ended."""
        self._text.leave()

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Take the next tokens, one or more, with theirs if these were asked for."""
        if not self.token_ids:
            self._first()
        self.token_ids += token_ids
        if logprobs:
            self._rows += logprobs
        self._pass_on(token_ids, logprobs)

    def feed_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Take log probabilities of the prompt's next tokens."""
        self._prompt_rows.extend(logprobs)
        self._text.wake()

    async def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """Wait for those of all the prompt's tokens but the first; raises as `next` does.

        To be called before `next`: no text is there until they are.
        """
        while len(self._prompt_rows) < self._prompt_tokens - 1:
            await self._text.woken()
            if len(self._prompt_rows) < self._prompt_tokens - 1:
                _, end = await self._text.next()
                if end is not None:
                    raise ProtocolError("the prompt's log probabilities did not come")
        return self._prompt_rows

    def end(self, outcome: Completion | MeshError) -> None:
        """Take the end of a generation."""
        if isinstance(outcome, MeshError):
            self._prompt_rows = []  # another attempt sends them all again
            self.interrupt(outcome)
            return
        self._generated = outcome
        self._finish(outcome)

    def interrupt(self, error: MeshError) -> None:
        """Make `next` raise `error`, after what has come."""
        if self.lost:
            self._missed = error
        else:
            self._text.interrupt(error)

    async def next(self) -> Piece:
        """Wait for text, or for the end; everything that is ready makes one piece.

        Raises what the generation, or the text, failed with.
        """
        while True:
            texts, end = await self._text.next()
            if end is not None:
                self.completion = self._merge(end)
            if texts or end is not None:
                count = texts[-1].token_count if texts else 0
                text = texts[0].text if len(texts) == 1 else "".join([t.text for t in texts])
                entries = texts[0].logprobs if len(texts) == 1 else ()
                if len(texts) > 1:
                    entries = tuple([entry for t in texts for entry in t.logprobs])
                if self._skip is not None:
                    text, entries = self._skip.cut(text, entries)
                    if end is None and not text and not entries:
                        continue
                self._sent.add(text, entries)
                if self.shift and entries:
                    entries = tuple([replace(e, offset=e.offset + self.shift) for e in entries])
                return Piece(
                    text, count, self.completion, self._index, entries, self._prompt_tokens
                )

    def _pass_on(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        if self._hides_last or self._hidden:
            token_ids, logprobs = self._hold_back(token_ids, logprobs)
        if token_ids:
            self._text.feed(token_ids, logprobs)

    def _finish(self, generated: Completion) -> None:
        ids, logprobs = self._held
        if ids and generated.finish_reason is not FinishReason.STOP:
            self._text.feed(ids, logprobs)
        self._text.finish()

    def _hold_back(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[list[int], list[TokenLogprob]]:
        ids, rows = [*self._held[0], *token_ids], [*self._held[1], *logprobs]
        last = len(ids) - 1 if self._hides_last or ids[-1] in self._hidden else len(ids)
        self._held = (ids[last:], rows[last:])
        return ids[:last], rows[:last]

    def _merge(self, text: Completion) -> Completion:
        """Return the whole answer's end from that of its text and that of its tokens."""
        generated = self._generated or Completion()
        counted = generated.usage or Usage(0, self.received)
        cached = counted.cached_tokens if self.cached_tokens is None else self.cached_tokens
        if isinstance(text.stop, str):
            read = text.usage.completion_tokens if text.usage else self.received
            usage = Usage(self._prompt_tokens, read, cached)
            return Completion(FinishReason.STOP, usage, text.stop)
        if self._generated is None:
            raise ProtocolError("the text ended before its tokens")
        usage = Usage(self._prompt_tokens, counted.completion_tokens, cached)
        return Completion(generated.finish_reason, usage, generated.stop)
