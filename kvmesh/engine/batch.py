"""Continuous batching on a bounded pool of blocks. Knows no model, time or event loop.

When a sequence finds no block, the last in line gives its own up, goes back to wait, and
recomputes later.
"""

from bisect import insort
from operator import attrgetter
from typing import Generic, TypeVar

from kvmesh.engine.sequence import BatchSequence, Kind, Phase
from kvmesh.kv.blocks import block_hashes_from, chain, seed
from kvmesh.kv.pool import BlockPool

S = TypeVar("S", bound=BatchSequence)

_KEY = attrgetter("key")


class Batch(Generic[S]):
    """The sequences of one engine and the blocks they hold.

    `waiting` is sorted, the next one last. `prompts` have tokens without KV besides the
    newest, `running` have only that one. `salt` is the model's name, as in block hashes.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, max_batch: int, salt: str) -> None:
        self.waiting: list[S] = []
        self.prompts: list[S] = []
        self.running: list[S] = []
        self.pulling: set[S] = set()
        self.preemptions = 0
        self.pool = pool
        self.block_size = block_size
        self._max_batch = max_batch
        self._root = seed(salt)
        self._arrivals = 0

    @property
    def busy(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self.running) + len(self.prompts) + len(self.pulling)

    def add(self, sequence: S) -> None:
        """Put a new sequence in line, behind earlier ones of its priority."""
        self._arrivals += 1
        sequence.key = (-sequence.request.priority, -self._arrivals)
        prompt = sequence.tokens[: sequence.prompt_length]
        sequence.hashes = block_hashes_from(self._root, prompt, self.block_size)
        insort(self.waiting, sequence, key=_KEY)

    def admit(self) -> list[S]:
        """Give blocks to as many of those in line as fit; return these. Some must pull now."""
        admitted = []
        while self.waiting and self.busy < self._max_batch:
            sequence = self.waiting[-1]
            if not self._reserve(sequence):
                break
            self.waiting.pop()
            admitted.append(sequence)
            if sequence.phase is Phase.PULLING:
                self.pulling.add(sequence)
            else:
                # Even one that has KV of all but its newest token: nothing of a life before
                # a preemption, or on another worker, is known where tokens are decoded.
                sequence.phase = Phase.RUNNING
                self.prompts.append(sequence)
        return admitted

    def join(self, sequence: S) -> None:
        """Run a sequence whose prompt was pulled; without a first token, the last is computed."""
        sequence.computed = min(sequence.prompt_length, len(sequence.tokens) - 1)
        self.publish(sequence, 0)
        sequence.ticket = None  # used up: after a preemption, this one recomputes
        self.pulling.discard(sequence)
        self.start(sequence)

    def start(self, sequence: S) -> None:
        """Put a sequence that has its blocks where it belongs."""
        sequence.phase = Phase.RUNNING
        length = len(sequence.tokens)
        if length > sequence.prompt_length and length == sequence.computed + 1:
            self.running.append(sequence)
        else:
            self.prompts.append(sequence)

    def settle(self) -> None:
        """Drop those that ended, and move those whose prompt is computed on to `running`."""
        self.running = [each for each in self.running if each.phase is Phase.RUNNING]
        prompts, self.prompts = self.prompts, []
        for sequence in prompts:
            if sequence.phase is Phase.RUNNING:
                self.start(sequence)

    def remove(self, sequence: S) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        for line in (self.waiting, self.prompts, self.running):
            if sequence in line:
                line.remove(sequence)
        self.pulling.discard(sequence)
        self.end(sequence)

    def end(self, sequence: S) -> None:
        """Free the blocks of a sequence that has ended."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.phase = Phase.ENDED

    def grow(self, sequence: S) -> bool:
        """Give a sequence a block for its newest token, at the cost of the last in line.

        False if that is itself: then it waits.
        """
        while sequence.computed // self.block_size == len(sequence.blocks):
            block = self.pool.allocate(1)
            if block is not None:
                sequence.blocks += block
                continue
            alive = (s for s in (*self.running, *self.prompts) if s.phase is Phase.RUNNING)
            victim = min((s for s in alive if s.announce is None), key=_KEY)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def publish(self, sequence: S, first: int) -> None:
        """Cache the blocks from number `first` on that are full by now."""
        size = self.block_size
        stop = sequence.computed // size
        hashes = sequence.hashes
        while len(hashes) < stop:
            at = len(hashes) * size
            parent = hashes[-1] if hashes else self._root
            hashes.append(chain(parent, sequence.tokens[at : at + size]))
        if first >= stop:
            return
        blocks = sequence.blocks
        if sequence.announce is not None:
            before = blocks[first - 1] if first else None
            self.pool.publish_in_place(before, blocks[first:stop], hashes[first:stop])
        else:
            blocks[first:stop] = self.pool.publish(blocks[first:stop], hashes[first:stop])

    def _reserve(self, sequence: S) -> bool:
        """Hold the blocks for all tokens so far and the next one; take over cached ones."""
        size, length = self.block_size, len(sequence.tokens)
        pull = sequence.ticket is not None and sequence.kind is Kind.RESUME
        # A prompt pulled with its first token may be cached to its end; else the last token
        # is computed anew.
        reusable = min(sequence.prompt_length if pull else length, length - 1) // size
        if sequence.scores is not None:  # all that is not scored yet has to be computed
            reusable = min(reusable, len(sequence.scores) // size)
        ahead = 0 if sequence.kind is Kind.PREFILL else 1
        count = -(-min(length + ahead, max(sequence.last_position, 1)) // size)
        reserved = self.pool.reserve(sequence.hashes[:reusable], count)
        if reserved is None:
            return False
        sequence.blocks = reserved.blocks
        sequence.computed = reserved.hits * size
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
        if pull:
            sequence.phase = Phase.PULLING
        return True

    def _preempt(self, victim: S) -> None:
        self.preemptions += 1
        for line in (self.running, self.prompts):
            if victim in line:
                line.remove(victim)
        self.end(victim)
        victim.computed = 0
        victim.phase = Phase.WAITING
        insort(self.waiting, victim, key=_KEY)
