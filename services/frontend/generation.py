"""One attempt to generate on a decode worker, until all that it held is free."""

from collections.abc import Callable, Sequence

from kvmesh.errors import MeshError
from kvmesh.rpc.clients import DecodeCall
from kvmesh.types import Completion, TokenLogprob
from services.frontend.answer import Answer
from services.frontend.placement import Placement


class Generation:
    """What one decode call says, passed on to the answer for as long as it is wanted.

    `give_back` ends the lease of the ticket that the call is to open. It is called when
    the worker says that it has ended without a token: the KV may wait still. When the
    worker is gone, it may be in the middle of pulling: the lease runs out by itself.
    """

    __slots__ = ("_answer", "_call", "_give_back", "_goes_on", "_left", "_placement", "_started")

    def __init__(
        self, answer: Answer, placement: Placement, give_back: Callable[[], None] | None
    ) -> None:
        self._answer = answer
        self._placement = placement
        self._give_back = give_back
        self._goes_on = bool(answer.received) and give_back is None
        self._call: DecodeCall | None = None
        self._started = False
        self._left = False

    def start(self, decode: Callable[["Generation"], DecodeCall]) -> None:
        """Dispatch; if it can't be, give the ticket back and raise."""
        try:
            self._call = decode(self)
        except MeshError as error:
            self._placement.failed(error)
            if self._give_back is not None:
                self._give_back()
            raise

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Take tokens; runs in the stream's reader."""
        if not self._started:
            self._started = True
            if self._call is not None and self._answer.cached_tokens is None:
                self._answer.cached_tokens = self._call.cached_tokens
            self._prefilled(self._answer.cached_tokens)
            self._placement.generating()
        if self._answer.open:
            self._answer.feed(token_ids, logprobs)
        else:
            self.leave()

    def done(self, outcome: Completion | MeshError) -> None:
        """Take the end; it comes, in the stream's reader, even after `leave`."""
        lost = self._call is not None and self._call.stream.broken is not None
        unopened = isinstance(outcome, MeshError) and not self._started and not lost
        if unopened and self._give_back is not None:
            self._give_back()
        if isinstance(outcome, Completion) and outcome.usage is not None:
            self._prefilled(outcome.usage.cached_tokens)
        if not self._left:
            if isinstance(outcome, MeshError):
                self._placement.failed(outcome)
            self._answer.end(outcome)

    def _prefilled(self, cached_tokens: int | None) -> None:
        # Of what it goes on from, the prompt's part is not known.
        self._placement.prefilled(None if self._goes_on else cached_tokens)

    def fail(self, error: MeshError) -> bool:
        """End with the failure of a prefill beside it, unless it was left; return whether.

        The ticket's lease ends with that.
        """
        if self._left:
            return False
        self._give_back = None
        self.leave()
        self._placement.failed(error)
        self._answer.end(error)
        return True

    def leave(self) -> None:
        """Stop generating, without waiting for it. Nothing more reaches the answer."""
        self._left = True
        if self._call is not None:
            self._call.leave()
