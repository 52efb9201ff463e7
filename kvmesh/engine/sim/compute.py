"""Computes steps of the simulated model. Knows no time and no event loop.

Each step decodes one token for every sequence that is up to date and computes a share of
the others' prompts. After a preemption the same bytes are computed, so the same tokens.
"""

from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvmesh.engine.base import Finish
from kvmesh.engine.batch import Batch
from kvmesh.engine.sequence import Kind, Phase
from kvmesh.engine.sim.model import WORD, KvMemory, SimModel, lanes
from kvmesh.engine.sim.ranking import choose, ranking, told
from kvmesh.engine.sim.sequence import SimSequence
from kvmesh.types import TokenLogprob


@dataclass(slots=True)
class Outcome:
    """What one step did: each sequence's new token and, if it ended, how; and the work."""

    tokens: list[tuple[SimSequence, int, Finish | None]] = field(default_factory=list)
    prefill_tokens: int = 0
    decodes: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens that the sequences decoded, and not ended, have KV of by now."""
        return sum(each.computed for each, _, end in self.tokens[: self.decodes] if end is None)


class Computer:
    """A model over the memory of its KV, and the most tokens that one step computes."""

    def __init__(self, model: SimModel, memory: KvMemory, max_batch_tokens: int) -> None:
        self.memory = memory
        self._model = model
        self._max_batch_tokens = max_batch_tokens

    def adopt(self, sequence: SimSequence) -> int:
        """Return the digest of a sequence's prompt from its blocks, which were pulled."""
        full, part = divmod(sequence.prompt_length, self.memory.block_size)
        sequence.base = self.memory.fold(self._model.origin, sequence.blocks[:full])
        sequence.folded = full
        if not part:
            return sequence.base
        return self.memory.fold_part(sequence.base, sequence.blocks[full], part)

    def step(self, batch: Batch[SimSequence]) -> Outcome:
        """Compute one step. Sequences that ended in it hold nothing any more."""
        outcome = Outcome()
        budget = max(1, self._max_batch_tokens - len(batch.running))
        prompts = batch.prompts
        if batch.running:
            self._decode(batch, outcome)
        for sequence in prompts:
            if budget and sequence.phase is Phase.RUNNING:
                budget -= self._compute(batch, sequence, budget, outcome)
        batch.settle()
        return outcome

    def _decode(self, batch: Batch[SimSequence], outcome: Outcome) -> None:
        """Compute the newest token of each running sequence and pick the next. The hot loop."""
        words, raw, digest_of = self.memory.words, self.memory.raw, xxh3_64_intdigest
        low, span = self._model.low, self._model.high - self._model.low
        produced = outcome.tokens
        for sequence in batch.running.copy():
            if sequence.phase is not Phase.RUNNING:
                continue
            slot = sequence.slot
            if slot == sequence.end:
                if not batch.grow(sequence):
                    continue
                self._locate(sequence)
                slot = sequence.slot
            tokens, base = sequence.tokens, sequence.base
            words[slot] = base ^ (tokens[-1] << 32 | sequence.computed)
            sequence.computed += 1
            sequence.slot = slot = slot + 1
            digest = digest_of(raw[sequence.start : slot * WORD], base)
            if slot == sequence.end:
                sequence.base = digest
                sequence.folded += 1
                batch.publish(sequence, sequence.folded - 1)
            if sequence.special or sequence.mix or sequence.left == 1:
                finish = self._pick(batch, sequence, digest)
                produced.append((sequence, tokens[-1], finish))
            else:
                token = low + digest % span
                tokens.append(token)
                sequence.left -= 1
                produced.append((sequence, token, None))
        outcome.decodes = len(produced)

    def _compute(
        self, batch: Batch[SimSequence], sequence: SimSequence, budget: int, outcome: Outcome
    ) -> int:
        """Compute up to `budget` tokens that have no KV yet; pick the next after the last."""
        memory, size = self.memory, self.memory.block_size
        first = sequence.computed
        filled = first // size
        if sequence.folded != filled:
            sequence.base = memory.fold(self._model.origin, sequence.blocks[:filled])
        count = min(budget, len(sequence.tokens) - first)
        base = sequence.base
        fresh = lanes(sequence.tokens[first : first + count], first)
        at, digest = 0, 0
        while at < len(fresh):
            index, offset = divmod(sequence.computed, size)
            part = fresh[at : at + (size - offset) * WORD]
            digest = memory.write(sequence.base, part, sequence.blocks[index], offset)
            at += len(part)
            sequence.computed += len(part) // WORD
            if sequence.computed % size == 0:
                sequence.base = digest
        sequence.folded = sequence.computed // size
        sequence.slot = sequence.end = 0
        if sequence.scores is not None:
            self._score(sequence, first, base, sequence.scores)
        batch.publish(sequence, filled)
        outcome.prefill_tokens += count
        if sequence.computed == len(sequence.tokens):
            sequence.digest = digest
            finish = self._pick(batch, sequence, digest)
            if finish is None and sequence.kind is Kind.PREFILL:
                sequence.phase = Phase.HELD
            outcome.tokens.append((sequence, sequence.tokens[-1], finish))
        return count

    def _pick(self, batch: Batch[SimSequence], sequence: SimSequence, digest: int) -> Finish | None:
        model, sampling = self._model, sequence.request.sampling
        if sequence.steered:
            token = choose(
                ranking(model, digest, sequence.mix),
                banned=sequence.banned_now,
                bias=dict(sampling.logit_bias),
                allowed=sampling.allowed_token_ids,
            )
        else:
            token = model.pick(digest, sequence.mix, sequence.banned_now)
        if sampling.logprobs is not None:
            sequence.logprob = told(ranking(model, digest), token, sampling.logprobs)
        finish = sequence.take(token)
        if finish is not None:
            batch.end(sequence)
        return finish

    def _score(
        self, sequence: SimSequence, first: int, base: int, scores: list[TokenLogprob]
    ) -> None:
        """Tell how likely the prompt's tokens were, from the bytes computed from `first` on.

        `base` is the digest of the full blocks before it.
        """
        memory, size = self.memory, self.memory.block_size
        count = sequence.request.sampling.prompt_logprobs or 0
        unscored = sequence.unscored(first, sequence.computed)
        for position in range(first, unscored.stop):
            index, offset = divmod(position, size)
            digest = memory.fold_part(base, sequence.blocks[index], offset + 1)
            if offset + 1 == size:
                base = digest
            if position in unscored:
                token = sequence.tokens[position + 1]
                scores.append(told(ranking(self._model, digest), token, count))

    def _locate(self, sequence: SimSequence) -> None:
        """Find the word for the next token."""
        size = self.memory.block_size
        index, offset = divmod(sequence.computed, size)
        first = sequence.blocks[index] * size
        sequence.start = first * WORD
        sequence.slot = first + offset
        sequence.end = first + size
