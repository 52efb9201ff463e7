"""What one step computes, and what comes of it. No torch here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.engine.base import Finish
from kvmesh.engine.batch import Batch
from kvmesh.engine.sequence import Kind, Phase
from kvmesh.engine.torch.sequence import TorchSequence
from kvmesh.types import TokenLogprob

Pick = tuple[int, TokenLogprob | None]
"""A picked token, and how likely it was where the request asks for that."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence that get their KV in a step: `count` from number `first` on.

    `blocks` are the sequence's as the step begins. `picks`: the token behind is picked.
    """

    sequence: TorchSequence
    blocks: Sequence[int]
    first: int
    count: int
    picks: bool

    @property
    def length(self) -> int:
        """Tokens with KV after the step."""
        return self.first + self.count

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens to compute."""
        return self.sequence.tokens[self.first : self.length]


def plan(batch: Batch[TorchSequence], budget: int) -> list[Span]:
    """Choose the tokens of a step, at most about `budget`, and find blocks for them.

    One for each sequence that decodes, the rest for prompts in order. Empty when all that
    was to be computed has lost its blocks.
    """
    for sequence in batch.running.copy():
        if sequence.phase is Phase.RUNNING:
            batch.grow(sequence)
    spans = [_span(sequence, 1) for sequence in batch.running]
    left = max(1, budget - len(spans))
    for sequence in batch.prompts:
        if left <= 0:
            break
        count = min(left, len(sequence.tokens) - sequence.computed)
        spans.append(_span(sequence, count))
        left -= count
    return spans


def commit(
    batch: Batch[TorchSequence], spans: Iterable[Span], picks: Iterable[Pick]
) -> list[tuple[TorchSequence, int, Finish | None]]:
    """Account for a computed step; `picks` are in the order of spans.

    Returns the token of each sequence that got one and how it ended if it did. Sequences
    removed in the meantime get none.
    """
    outcome = []
    picked = iter(picks)
    for span in spans:
        sequence = span.sequence
        pick = next(picked) if span.picks else None
        if sequence.phase is not Phase.RUNNING:
            continue
        sequence.computed = span.length
        batch.publish(sequence, span.first // batch.block_size)
        if pick is None:
            continue
        token, sequence.logprob = pick
        finish = sequence.take(token)
        if finish is not None:
            batch.end(sequence)
        elif sequence.kind is Kind.PREFILL:
            sequence.phase = Phase.HELD
        outcome.append((sequence, token, finish))
    batch.settle()
    return outcome


def _span(sequence: TorchSequence, count: int) -> Span:
    first = sequence.computed
    picks = first + count == len(sequence.tokens)
    return Span(sequence, sequence.blocks, first, count, picks)
