"""One completion on its way: token ids in from the engines, text out to the caller."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.errors import MeshError, ProtocolError
from kvmesh.rpc.clients import TextCall
from kvmesh.types import Completion, FinishReason, Usage
from services.frontend.request import Request


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes next of an answer. The last piece, and only it, has the completion.

    `text` may be empty in the last one. `token_count`: tokens read so far, in all.
    """

    text: str
    token_count: int
    completion: Completion | None = None


class Answer:
    """Joins what generates tokens and what turns them into text.

    `feed` and `end` are called by streams' readers: they don't block and don't raise.
    A generation that fails makes `next` raise; another one may then go on feeding.
    """

    def __init__(
        self, text: TextCall, request: Request, prompt_tokens: int, first: Callable[[], None]
    ) -> None:
        self.received = 0
        """Tokens generated so far, those that the text does not show included."""
        self.cached_tokens: int | None = None
        """Prompt tokens that a remote prefill found cached; None: decode will say."""
        self.completion: Completion | None = None
        """How it all ended, once the last piece is there."""
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._first = first
        self._generated: Completion | None = None
        # The token that ends generation has no text of its own: hold back what may be it.
        self._hides_last = request.keep_special and not request.include_stop
        self._hidden = frozenset(() if request.include_stop else request.sampling.stop_token_ids)
        self._held: list[int] = []

    @property
    def generated(self) -> bool:
        """Whether all tokens are there."""
        return self._generated is not None

    @property
    def open(self) -> bool:
        """Whether the text can still take tokens."""
        return self._text.stream.is_live(self._text.stream_id)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens, one or more."""
        if not self.received:
            self._first()
        self.received += len(token_ids)
        if self._hides_last or self._hidden:
            token_ids = self._hold_back(token_ids)
        if token_ids:
            self._text.feed(token_ids)

    def end(self, outcome: Completion | MeshError) -> None:
        """Take the end of a generation."""
        if isinstance(outcome, MeshError):
            self._text.interrupt(outcome)
            return
        self._generated = outcome
        if self._held and outcome.finish_reason is not FinishReason.STOP:
            self._text.feed(self._held)
        self._text.finish()

    def interrupt(self, error: MeshError) -> None:
        """Make `next` raise `error`, after what has come."""
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
                return Piece(text, count, self.completion)

    def _hold_back(self, token_ids: Sequence[int]) -> list[int]:
        ready = [*self._held, *token_ids]
        last = self._hides_last or ready[-1] in self._hidden
        self._held = [ready.pop()] if last else []
        return ready

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
