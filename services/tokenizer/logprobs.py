"""Log probabilities in step with the text: which tokens go out with which text. Pure.

Tokens come one by one, with what each does to the text; entries come back once the text
that their tokens end in may be sent.
"""

from collections import deque
from dataclasses import dataclass

from kvmesh.types import TextLogprob, TokenLogprob, TokenScore
from services.tokenizer.detokenize import Detokenizer, TokenText


@dataclass(slots=True)
class _Waiting:
    """A token whose entry has not gone out. Positions are in characters of the whole text.

    `end` is where its text ends: for a part of a character that one's end.
    """

    token_id: int
    row: TokenLogprob
    top: tuple[TokenScore, ...]
    data: bytes
    begin: int
    end: int

    def entry(self) -> TextLogprob:
        """Return what goes out."""
        token = TokenScore(self.token_id, self.data, self.row.logprob)
        return TextLogprob(token, self.begin, self.top, self.row.rank)


class TextLogprobs:
    """The log probabilities of one completion, in order, each token once.

    What is told of the text is what may be sent of it; a token's entry is due with the text
    that it ends in. A token without text is due with what came before it.
    """

    __slots__ = ("_detokenizer", "_length", "_sent", "_waiting")

    def __init__(self, detokenizer: Detokenizer) -> None:
        """Take the completion's detokenizer; it stays the caller's to push to."""
        self._detokenizer = detokenizer
        self._waiting: deque[_Waiting] = deque()
        self._length = 0
        self._sent = 0

    def push(self, id_: int, row: TokenLogprob) -> str:
        """Take one token; return the text that it completes.

        Raises `EngineError` for an id outside the vocabulary, in `row` too.
        """
        # Before the token itself: this is how the others would show in its place.
        top = tuple(self._score(other, logprob) for other, logprob in row.top)
        shown = self._detokenizer.push_one(id_)
        self._waiting.append(self._placed(id_, row, top, shown))
        return shown.text

    def flush(self) -> str:
        """Return the rest of the text: no more tokens come."""
        rest = self._detokenizer.flush()
        last = next((one for one in reversed(self._waiting) if one.end > self._length), None)
        if last is not None and not last.data:
            last.data = rest.encode()
        self._length += len(rest)
        return rest

    def sent(self, length: int) -> list[TextLogprob]:
        """Return the entries that are due with the next `length` characters of text."""
        self._sent += length
        waiting, due = self._waiting, []
        while waiting and waiting[0].end <= self._sent:
            due.append(waiting.popleft().entry())
        return due

    def stopped(self, length: int) -> list[TextLogprob]:
        """Return the last entries: the text ends after the next `length` characters.

        They are those of tokens that begin in what is sent, and of tokens without text
        that are not after any of the others.
        """
        self._sent += length
        due = []
        for one in self._waiting:
            if one.begin > self._sent or (one.data and one.begin == self._sent):
                break
            due.append(one.entry())
        self._waiting.clear()
        return due

    def finished(self) -> list[TextLogprob]:
        """Return all that is left: the text is sent to its end."""
        due = [one.entry() for one in self._waiting]
        self._waiting.clear()
        return due

    def _placed(
        self, id_: int, row: TokenLogprob, top: tuple[TokenScore, ...], shown: TokenText
    ) -> _Waiting:
        begin = self._length + shown.begins
        self._length += len(shown.text)
        return _Waiting(id_, row, top, shown.data, begin, self._length + shown.waits)

    def _score(self, id_: int, logprob: float) -> TokenScore:
        return TokenScore(id_, self._detokenizer.shown(id_), logprob)
