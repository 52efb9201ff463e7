"""What one step computes, and what comes of it. No torch here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.engine.base import Finish
from kvmesh.engine.batch import Batch
from kvmesh.engine.sequence import Kind, Phase
from kvmesh.engine.torch.sequence import TorchSequence
from kvmesh.types import TokenLogprob

Pick = tuple[int, TokenLogprob | None]
"""A picked token, and how likely it was where the request asks for that."""

SCORED_ROWS = 256
"""Prompt positions that one step scores: each is a row of logits, as wide as the vocabulary."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence that get their KV in a step: `count` from number `first` on.

    `blocks` are the sequence's as the step begins. `picks`: the token behind is picked.
    `scores` are the positions behind which the prompt's next token is scored.
    """

    sequence: TorchSequence
    blocks: Sequence[int]
    first: int
    count: int
    picks: bool
    scores: range = field(default=range(0))

    @property
    def length(self) -> int:
        """Tokens with KV after the step."""
        return self.first + self.count

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens to compute."""
        return self.sequence.tokens[self.first : self.length]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step found out behind a span's tokens."""

    span: Span
    pick: Pick | None = None
    scores: Sequence[TokenLogprob] = ()


def plan(batch: Batch[TorchSequence], budget: int) -> list[Span]:
    """Choose the tokens of a step, at most about `budget`, and find blocks for them.

    One for each sequence that decodes, the rest for prompts in order; of those that are
    scored, at most `SCORED_ROWS`. Empty when all that was to be computed has lost its blocks.
    """
    for sequence in batch.running.copy():
        if sequence.phase is Phase.RUNNING:
            batch.grow(sequence)
    spans = [_span(sequence, 1) for sequence in batch.running]
    left, rows = max(1, budget - len(spans)), SCORED_ROWS
    for sequence in batch.prompts:
        if left <= 0:
            break
        first = sequence.computed
        count = min(left, len(sequence.tokens) - first)
        scores = sequence.unscored(first, first + count)
        if len(scores) > rows:
            scores = scores[:rows]
            count = scores.stop - first
            if not count:
                continue
        spans.append(_span(sequence, count, scores))
        left -= count
        rows -= len(scores)
    return spans


def commit(
    batch: Batch[TorchSequence], computed: Iterable[Computed]
) -> list[tuple[TorchSequence, int, Finish | None]]:
    """Account for a computed step.

    Returns the token of each sequence that got one and how it ended if it did. Sequences
    removed in the meantime get none.
    """
    outcome = []
    for done in computed:
        span, sequence = done.span, done.span.sequence
        if sequence.phase is not Phase.RUNNING:
            continue
        sequence.computed = span.length
        batch.publish(sequence, span.first // batch.block_size)
        if done.scores and sequence.scores is not None:
            sequence.scores += done.scores
        if done.pick is None:
            continue
        token, sequence.logprob = done.pick
        finish = sequence.take(token)
        if finish is not None:
            batch.end(sequence)
        elif sequence.kind is Kind.PREFILL:
            sequence.phase = Phase.HELD
        outcome.append((sequence, token, finish))
    batch.settle()
    return outcome


def _span(sequence: TorchSequence, count: int, scores: range = range(0)) -> Span:
    first = sequence.computed
    picks = first + count == len(sequence.tokens)
    return Span(sequence, sequence.blocks, first, count, picks, scores)
