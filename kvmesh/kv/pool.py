"""Bookkeeping of a pool of KV blocks: who holds which, and which prefixes are cached.

No memory and no asyncio in here: an engine keeps one `BlockPool` beside the memory its
block numbers point into, and asks it from one task.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.types import BlocksRemoved, BlocksStored, KvEvent


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks now held for one sequence: the first `hits` of them are cached content."""

    blocks: list[int]
    hits: int


class BlockPool:
    """Blocks 0 to `total_blocks - 1`, counted by holder, with a prefix cache in the idle ones.

    A block is held (by one or more), idle (held by nobody, but cached under its chained
    hash until its place is needed, least recently held first) or free. One rule keeps
    the cache whole, that a cached block's parent is cached: a sequence holds a prefix of
    its blocks, never only a later part.

    `sink` gets an event for each change of the cache, at once and in order.
    """

    def __init__(self, total_blocks: int, sink: Callable[[KvEvent], None] | None = None) -> None:
        self.total_blocks = total_blocks
        self._sink = sink or _ignore
        self._holders = [0] * total_blocks
        self._free = list(range(total_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Blocks held by somebody."""
        return self.total_blocks - self.available

    @property
    def available(self) -> int:
        """Blocks that can be had now, idle ones included."""
        return len(self._free) + len(self._idle)

    def snapshot(self) -> list[int]:
        """Return the hashes of all cached blocks, a parent before its children."""
        return list(self._block_of)

    def lookup(self, hashes: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, without holding them."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reserve(self, hashes: Sequence[int], count: int) -> Reserved | None:
        """Hold `count` blocks for a sequence whose first full blocks have `hashes`.

        Those that are cached come first, the rest are new, with unknown content. None, and
        nothing changes, when there are too few.
        """
        hits = self.lookup(hashes[:count])
        idle_hits = sum(1 for block in hits if not self._holders[block])
        if count - len(hits) > self.available - idle_hits:
            return None
        for block in hits:
            self._hold(block)
        return Reserved(hits + self._take(count - len(hits)), len(hits))

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` new blocks, with unknown content. None when there are too few."""
        if count > self.available:
            return None
        return self._take(count)

    def publish(self, blocks: Sequence[int], hashes: Sequence[int]) -> list[int]:
        """Cache held, now full blocks under their hashes, a parent before its children.

        Returns the blocks to use from now on: where a hash is cached already, that block
        is held instead, and the given one is let go.
        """
        kept, stored = [], []
        for block, block_hash in zip(blocks, hashes, strict=True):
            known = self._block_of.get(block_hash)
            if known is None:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
                stored.append(block_hash)
            elif known != block:
                self._hold(known)
                self.release((block,))
            kept.append(block if known is None else known)
        if stored:
            self._sink(BlocksStored(stored))
        return kept

    def publish_in_place(
        self, parent: int | None, blocks: Sequence[int], hashes: Sequence[int]
    ) -> None:
        """Cache as many of these as can be without exchanging any; `parent` is before the first.

        None behind one that is cached elsewhere: a parent must not go before its child.
        """
        if parent is not None and parent not in self._hash_of:
            return
        fresh = 0
        while fresh < len(blocks) and hashes[fresh] not in self._block_of:
            fresh += 1
        self.publish(blocks[:fresh], hashes[:fresh])

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of one hold on each of a sequence's `blocks`, given in their order.

        The last ones become the first to be evicted, so that no parent goes before its child.
        """
        holders = self._holders
        for block in reversed(blocks):
            if holders[block] <= 0:
                raise ValueError(f"block {block} is held by nobody")
            holders[block] -= 1
            if holders[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            del self._idle[block]
        self._holders[block] += 1

    def _take(self, count: int) -> list[int]:
        short = count - len(self._free)
        if short > 0:
            self._evict(short)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def _evict(self, count: int) -> None:
        removed = []
        for _ in range(count):
            block, _none = self._idle.popitem(last=False)
            block_hash = self._hash_of.pop(block)
            del self._block_of[block_hash]
            self._free.append(block)
            removed.append(block_hash)
        self._sink(BlocksRemoved(removed))


def _ignore(event: KvEvent) -> None:
    del event
