"""The text of one completion: detokenizer and stop strings together. Pure."""

from collections.abc import Sequence

from kvmesh.errors import InvalidRequestError
from services.tokenizer.detokenize import Detokenizer
from services.tokenizer.stops import StopMatcher


class CompletionText:
    """Turns the token deltas of one completion into text that may be sent.

    `token_count` counts the tokens read, up to the one that completed a stop string.
    `stop_string` is the one that ended the text, else None; then nothing more comes.
    """

    __slots__ = ("_detokenizer", "_matcher", "token_count")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher | None = None) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.token_count = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, offset: int, token_ids: Sequence[int]) -> str:
        """Take the tokens at `offset`; return text to send, perhaps empty.

        Raises `InvalidRequestError` where tokens are missing or repeated, `EngineError`
        for an id outside the vocabulary.
        """
        if offset != self.token_count:
            raise InvalidRequestError(
                f"tokens at offset {offset} came where {self.token_count} was due", field="offset"
            )
        count = len(token_ids)
        matcher = self._matcher
        if matcher is None:
            text = self._detokenizer.push(token_ids)
        else:
            before = self._detokenizer.fork() if count > 1 else None
            text = matcher.push(self._detokenizer.push(token_ids))
            if before is not None and matcher.matched is not None:
                count = _tokens_for(before, token_ids, matcher.consumed)
        self.token_count += count
        return text

    def finish(self) -> str:
        """No more tokens come: return the rest of the text. It may end in a stop string."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest) + self._matcher.flush()


def _tokens_for(detokenizer: Detokenizer, token_ids: Sequence[int], characters: int) -> int:
    """Return how many of the tokens it takes to make up so many characters."""
    count = 0
    while characters > 0:
        characters -= len(detokenizer.push(token_ids[count : count + 1]))
        count += 1
    return count
