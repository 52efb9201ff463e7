"""Continuous batching on a bounded pool of blocks. Knows no time and no event loop.

Each `step` decodes one token for every sequence that is up to date and computes a share of
the others' prompts. When a sequence finds no block, the last in line gives its own up,
goes back to wait, and recomputes later: to the same bytes, so to the same tokens.
"""

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from xxhash import xxh3_64_intdigest

from kvmesh.engine.base import Finish
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.model import WORD, KvMemory, SimModel, lanes
from kvmesh.engine.sim.sequence import Kind, Phase, SimSequence
from kvmesh.kv.blocks import block_hashes_from, chain, seed
from kvmesh.kv.pool import BlockPool

_KEY = attrgetter("key")


@dataclass(slots=True)
class Outcome:
    """What one step did: each sequence's new token and, if it ended, how; and the work."""

    tokens: list[tuple[SimSequence, int, Finish | None]] = field(default_factory=list)
    prefill_tokens: int = 0
    decodes: int = 0
    kv_tokens: int = 0


class Scheduler:
    """The sequences of one engine. `salt` is the model's name, as in block hashes."""

    def __init__(
        self, config: SimConfig, model: SimModel, memory: KvMemory, pool: BlockPool, *, salt: str
    ) -> None:
        self.waiting: list[SimSequence] = []
        self.prompts: list[SimSequence] = []
        self.running: list[SimSequence] = []
        self.pulling: set[SimSequence] = set()
        self.preemptions = 0
        self._config = config
        self._model = model
        self._memory = memory
        self._pool = pool
        self._root = seed(salt)
        self._arrivals = 0
        self._counts_kv = config.latency.waits

    def add(self, sequence: SimSequence) -> None:
        """Put a new sequence in line, behind earlier ones of its priority."""
        self._arrivals += 1
        sequence.key = (-sequence.request.priority, -self._arrivals)
        prompt = sequence.tokens[: sequence.prompt_length]
        sequence.hashes = block_hashes_from(self._root, prompt, self._config.block_size)
        insort(self.waiting, sequence, key=_KEY)

    def admit(self) -> list[SimSequence]:
        """Give blocks to as many of those in line as fit; return those that must pull now."""
        pulls = []
        while self.waiting and self._busy() < self._config.max_batch:
            sequence = self.waiting[-1]
            if not self._reserve(sequence):
                break
            self.waiting.pop()
            if sequence.phase is Phase.PULLING:
                self.pulling.add(sequence)
                pulls.append(sequence)
            else:
                self._start(sequence)
        return pulls

    def adopt(self, sequence: SimSequence) -> int:
        """Return the digest of a sequence's prompt from its blocks, which were pulled."""
        full, part = divmod(sequence.prompt_length, self._config.block_size)
        sequence.base = self._memory.fold(self._model.origin, sequence.blocks[:full])
        if not part:
            return sequence.base
        return self._memory.fold_part(sequence.base, sequence.blocks[full], part)

    def join(self, sequence: SimSequence) -> None:
        """Run a sequence whose pulled prompt was found right."""
        full = sequence.prompt_length // self._config.block_size
        kept = self._pool.publish(sequence.blocks[:full], sequence.hashes[:full])
        sequence.blocks[:full] = kept
        sequence.computed = sequence.prompt_length
        sequence.ticket = None  # used up: after a preemption, this one recomputes
        self.pulling.discard(sequence)
        self._start(sequence)

    def remove(self, sequence: SimSequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        for line in (self.waiting, self.prompts, self.running):
            if sequence in line:
                line.remove(sequence)
        self.pulling.discard(sequence)
        self._end(sequence)

    def step(self) -> Outcome:
        """Compute one step. Sequences that ended in it hold nothing any more."""
        outcome = Outcome()
        budget = max(1, self._config.max_batch_tokens - len(self.running))
        prompts = self.prompts
        if self.running:
            self._decode(outcome)
        for sequence in prompts:
            if budget and sequence.phase is Phase.RUNNING:
                budget -= self._compute(sequence, budget, outcome)
        if prompts:
            self._sort_out(prompts)
        return outcome

    def _busy(self) -> int:
        return len(self.running) + len(self.prompts) + len(self.pulling)

    def _reserve(self, sequence: SimSequence) -> bool:
        """Hold the blocks for all tokens so far and the next one; take over cached ones."""
        config, size = self._config, self._config.block_size
        length = len(sequence.tokens)
        pull = sequence.ticket is not None and sequence.kind is Kind.RESUME
        # A pulled prompt may be cached to its end; else the last token is computed anew.
        reusable = sequence.prompt_length // size if pull else (length - 1) // size
        ahead = 0 if sequence.kind is Kind.PREFILL else 1
        count = -(-min(length + ahead, max(sequence.last_position, 1)) // size)
        reserved = self._pool.reserve(sequence.hashes[:reusable], count)
        if reserved is None:
            return False
        sequence.blocks = reserved.blocks
        sequence.computed = reserved.hits * config.block_size
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
        if pull:
            sequence.phase = Phase.PULLING
        else:
            hits = reserved.blocks[: reserved.hits]
            sequence.base = self._memory.fold(self._model.origin, hits)
        return True

    def _start(self, sequence: SimSequence) -> None:
        sequence.phase = Phase.RUNNING
        length = len(sequence.tokens)
        if length > sequence.prompt_length and length == sequence.computed + 1:
            self._locate(sequence)
            self.running.append(sequence)
        else:
            self.prompts.append(sequence)

    def _decode(self, outcome: Outcome) -> None:
        """Compute the newest token of each running sequence and pick the next. The hot loop."""
        words, raw, digest_of = self._memory.words, self._memory.raw, xxh3_64_intdigest
        low, span = self._model.low, self._model.high - self._model.low
        produced = outcome.tokens
        left_batch = False
        for sequence in self.running.copy():
            if sequence.phase is not Phase.RUNNING:
                continue
            slot = sequence.slot
            if slot == sequence.end:
                if not self._grow(sequence):
                    left_batch = True
                    continue
                slot = sequence.slot
            tokens, base = sequence.tokens, sequence.base
            words[slot] = base ^ (tokens[-1] << 32 | sequence.computed)
            sequence.computed += 1
            sequence.slot = slot = slot + 1
            digest = digest_of(raw[sequence.start : slot * WORD], base)
            if slot == sequence.end:
                self._filled(sequence, digest)
            if sequence.special or sequence.mix or sequence.left == 1:
                finish = self._pick(sequence, digest)
                left_batch = left_batch or finish is not None
                produced.append((sequence, tokens[-1], finish))
            else:
                token = low + digest % span
                tokens.append(token)
                sequence.left -= 1
                produced.append((sequence, token, None))
        outcome.decodes = len(produced)
        if left_batch:
            self.running = [each for each in self.running if each.phase is Phase.RUNNING]
        if self._counts_kv:
            outcome.kv_tokens = sum(each.computed for each in self.running)

    def _compute(self, sequence: SimSequence, budget: int, outcome: Outcome) -> int:
        """Compute up to `budget` tokens that have no KV yet; pick the next after the last."""
        memory, size = self._memory, self._config.block_size
        first = sequence.computed
        count = min(budget, len(sequence.tokens) - first)
        fresh = lanes(sequence.tokens[first : first + count], first)
        filled = first // size
        at, digest = 0, 0
        while at < len(fresh):
            index, offset = divmod(sequence.computed, size)
            part = fresh[at : at + (size - offset) * WORD]
            digest = memory.write(sequence.base, part, sequence.blocks[index], offset)
            at += len(part)
            sequence.computed += len(part) // WORD
            if sequence.computed % size == 0:
                sequence.base = digest
        self._publish(sequence, filled)
        outcome.prefill_tokens += count
        if sequence.computed == len(sequence.tokens):
            sequence.digest = digest
            finish = self._pick(sequence, digest)
            if finish is None and sequence.kind is Kind.PREFILL:
                sequence.phase = Phase.HELD
            outcome.tokens.append((sequence, sequence.tokens[-1], finish))
        return count

    def _pick(self, sequence: SimSequence, digest: int) -> Finish | None:
        early = len(sequence.tokens) < sequence.least
        banned = sequence.banned if early else frozenset()
        token = self._model.pick(digest, sequence.mix, banned)
        sequence.tokens.append(token)
        sequence.left -= 1
        finish = sequence.finish(token, self._model.eos_token_id)
        if finish is not None:
            self._end(sequence)
        return finish

    def _sort_out(self, prompts: list[SimSequence]) -> None:
        """Move sequences whose prompt is computed on to decoding."""
        self.prompts = []
        for sequence in prompts:
            if sequence.phase is Phase.RUNNING:
                self._start(sequence)

    def _grow(self, sequence: SimSequence) -> bool:
        """Give a sequence its next block, at the cost of the last in line; False if that's it."""
        while sequence.computed // self._config.block_size == len(sequence.blocks):
            block = self._pool.allocate(1)
            if block is not None:
                sequence.blocks += block
                continue
            victim = min(self._alive(), key=_KEY)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._locate(sequence)
        return True

    def _alive(self) -> list[SimSequence]:
        return [each for each in (*self.running, *self.prompts) if each.phase is Phase.RUNNING]

    def _preempt(self, victim: SimSequence) -> None:
        self.preemptions += 1
        for line in (self.running, self.prompts):
            if victim in line:
                line.remove(victim)
        self._pool.release(victim.blocks)
        victim.blocks = []
        victim.phase = Phase.WAITING
        insort(self.waiting, victim, key=_KEY)

    def _locate(self, sequence: SimSequence) -> None:
        """Find the word for the next token; none yet where its block is still to come."""
        index, offset = divmod(sequence.computed, self._config.block_size)
        if index == len(sequence.blocks):
            sequence.slot = sequence.end = 0
            return
        first = sequence.blocks[index] * self._config.block_size
        sequence.start = first * WORD
        sequence.slot = first + offset
        sequence.end = first + self._config.block_size

    def _filled(self, sequence: SimSequence, digest: int) -> None:
        sequence.base = digest
        self._publish(sequence, sequence.computed // self._config.block_size - 1)
        self._locate(sequence)

    def _publish(self, sequence: SimSequence, first: int) -> None:
        """Cache the blocks from number `first` on that are full by now."""
        size = self._config.block_size
        stop = sequence.computed // size
        hashes = sequence.hashes
        while len(hashes) < stop:
            at = len(hashes) * size
            hashes.append(
                chain(hashes[-1] if hashes else self._root, sequence.tokens[at : at + size])
            )
        if first < stop:
            sequence.blocks[first:stop] = self._pool.publish(
                sequence.blocks[first:stop], hashes[first:stop]
            )

    def _end(self, sequence: SimSequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.phase = Phase.ENDED
