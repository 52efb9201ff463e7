"""The text of one completion: detokenizer, stop strings and log probabilities. Pure."""

from collections.abc import Sequence

from kvmesh.errors import InvalidRequestError
from kvmesh.types import TextLogprob, TokenLogprob
from services.tokenizer.detokenize import Detokenizer
from services.tokenizer.logprobs import TextLogprobs
from services.tokenizer.stops import StopMatcher


class CompletionText:
    """Turns the token deltas of one completion into text that may be sent.

    `token_count` counts the tokens read, up to the one that completed a stop string.
    `stop_string` is the one that ended the text, else None; then nothing more comes.

    `min_tokens`: a stop string counts only if a token after the first so many completes
    it. One that is complete before is text like any other; one that begins there and is
    completed later counts, and is cut off whole.

    What is sent in all, the count and the stop string do not depend on how the tokens were
    cut into pushes.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "token_count")

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher | None = None, *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self.token_count = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched if self._matcher is not None else None

    def scored(self) -> "ScoredText":
        """Return the same completion with log probabilities, instead of this one.

        Only before the first token.
        """
        return ScoredText(self._detokenizer, self._matcher, min_tokens=self._min_tokens)

    def push(self, offset: int, token_ids: Sequence[int]) -> str:
        """Take the tokens at `offset`; return text to send, perhaps empty.

        Raises `InvalidRequestError` where tokens are missing or repeated, `EngineError`
        for an id outside the vocabulary.
        """
        if offset != self.token_count:
            raise self._gap(offset)
        count = len(token_ids)
        matcher = self._matcher
        if matcher is None:
            text = self._detokenizer.push(token_ids)
        elif offset < self._min_tokens:
            return self._push_early(matcher, token_ids)
        else:
            before = self._detokenizer.fork() if count > 1 else None
            text = matcher.push(self._detokenizer.push(token_ids))
            if before is not None and matcher.matched is not None:
                count = _tokens_for(before, token_ids, matcher.consumed)
        self.token_count += count
        return text

    def finish(self) -> str:
        """No more tokens come: return the rest of the text. It may end in a stop string."""
        return self._finish(self._detokenizer.flush())

    def _push_early(self, matcher: StopMatcher, token_ids: Sequence[int]) -> str:
        """Take tokens that begin within the first `min_tokens`."""
        early = token_ids[: self._min_tokens - self.token_count]
        text = matcher.skip(self._detokenizer.push(early))
        self.token_count += len(early)
        late = token_ids[len(early) :]
        return text + self.push(self.token_count, late) if late else text

    def _finish(self, rest: str) -> str:
        if self._matcher is None:
            return rest
        # What is left belongs to the last token read.
        late = self.token_count > self._min_tokens
        text = self._matcher.push(rest) if late else self._matcher.skip(rest)
        return text + self._matcher.flush()

    def _gap(self, offset: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"tokens at offset {offset} came where {self.token_count} was due", field="offset"
        )


class ScoredText(CompletionText):
    """A completion whose tokens come with log probabilities, each token with its own.

    The entries do not depend on how the tokens were cut into pushes, either.
    """

    __slots__ = ("_logprobs",)

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher | None = None, *, min_tokens: int = 0
    ) -> None:
        super().__init__(detokenizer, matcher, min_tokens=min_tokens)
        self._logprobs = TextLogprobs(detokenizer)

    def push_scored(
        self, offset: int, token_ids: Sequence[int], rows: Sequence[TokenLogprob]
    ) -> tuple[str, list[TextLogprob]]:
        """Take tokens as `push` does; return text and the entries that go with it.

        Raises also `InvalidRequestError` where there is not one row for each token.
        """
        if offset != self.token_count:
            raise self._gap(offset)
        if len(rows) != len(token_ids):
            raise InvalidRequestError(
                f"{len(rows)} log probabilities came with {len(token_ids)} tokens",
                field="logprobs",
            )
        text = ""
        for id_, row in zip(token_ids, rows, strict=True):
            text += self._release(self._logprobs.push(id_, row))
            self.token_count += 1
            if self.stop_string is not None:
                return text, self._logprobs.stopped(len(text))
        return text, self._logprobs.sent(len(text))

    def finish_scored(self) -> tuple[str, list[TextLogprob]]:
        """Do as `finish`; return the last entries, too."""
        text = self._finish(self._logprobs.flush())
        if self.stop_string is not None:
            return text, self._logprobs.stopped(len(text))
        return text, self._logprobs.finished()

    def _release(self, text: str) -> str:
        """Return what may be sent, with the next token's text."""
        if self._matcher is None:
            return text
        if self.token_count < self._min_tokens:
            return self._matcher.skip(text)
        return self._matcher.push(text)


def _tokens_for(detokenizer: Detokenizer, token_ids: Sequence[int], characters: int) -> int:
    """Return how many of the tokens it takes to make up so many characters."""
    count = 0
    while characters > 0:
        characters -= len(detokenizer.push(token_ids[count : count + 1]))
        count += 1
    return count
