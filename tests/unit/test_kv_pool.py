"""The pool of blocks against a plain model of it, and its edges one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvmesh.kv.blocks import block_hashes
from kvmesh.kv.pool import BlockPool
from kvmesh.types import BlocksRemoved, BlocksStored, KvEvent

SIZE = 2
TOTAL = 8


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet come, fill blocks, share prefixes and go."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[KvEvent] = []
        self.pool = BlockPool(TOTAL, self.events.append)
        self.held: list[tuple[list[int], list[int]]] = []  # blocks, hashes of full ones
        self.content: dict[int, int] = {}
        self.parents: dict[int, int | None] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), spare=st.integers(0, 1))
    def admit(self, tokens: list[int], spare: int) -> None:
        hashes = block_hashes(tokens, SIZE, "m")
        self.parents |= dict(zip(hashes, [None, *hashes], strict=False))
        count = -(-len(tokens) // SIZE) + spare
        before = (self.pool.used, self.pool.snapshot())
        cached = len(self.pool.lookup(hashes))
        reserved = self.pool.reserve(hashes, count)
        if reserved is None:
            assert (self.pool.used, self.pool.snapshot()) == before
            return
        blocks = reserved.blocks
        assert len(blocks) == len(set(blocks)) == count
        assert reserved.hits == cached
        for block, block_hash in zip(blocks[: reserved.hits], hashes, strict=False):
            assert self.content[block] == block_hash
        fresh = blocks[reserved.hits : len(hashes)]
        for block, block_hash in zip(fresh, hashes[reserved.hits :], strict=True):
            self.content[block] = block_hash
        kept = self.pool.publish(fresh, hashes[reserved.hits :])
        blocks[reserved.hits : len(hashes)] = kept
        self.held.append((blocks, hashes))

    @rule()
    def twins(self) -> None:
        """Two sequences compute the same block at once; the second one's is let go."""
        hashes = block_hashes([7, 7], SIZE, "twins")
        self.parents[hashes[0]] = None
        if self.pool.available < 2 or self.pool.lookup(hashes):
            return
        one, two = self.pool.allocate(1), self.pool.allocate(1)
        assert one is not None
        assert two is not None
        self.content[one[0]] = self.content[two[0]] = hashes[0]
        assert self.pool.publish(one, hashes) == one
        assert self.pool.publish(two, hashes) == one
        self.held += [(one, hashes), (one.copy(), hashes)]

    @rule(known=st.integers(0, 2))
    def twin_in_place(self, known: int) -> None:
        """A sequence that keeps its blocks publishes them, behind one that had some before."""
        hashes = block_hashes([8] * 2 * SIZE, SIZE, "m")
        self.parents |= dict(zip(hashes, [None, *hashes], strict=False))
        if self.pool.available < 2 + known or self.pool.lookup(hashes):
            return
        other, mine = self.pool.allocate(known), self.pool.allocate(2)
        assert other is not None
        assert mine is not None
        self.content |= dict(zip(mine, hashes, strict=True))
        self.content |= dict(zip(other, hashes, strict=False))
        assert self.pool.publish(other, hashes[:known]) == other
        self.pool.publish_in_place(None, mine[:1], hashes[:1])
        self.pool.publish_in_place(mine[0], mine[1:], hashes[1:])
        assert self.pool.lookup(hashes) == (other or mine)
        self.held += [(other, hashes[:known]), (mine, [] if known else hashes)]

    @rule(which=st.integers(0, 30))
    def leave(self, which: int) -> None:
        if self.held:
            blocks, _ = self.held.pop(which % len(self.held))
            self.pool.release(blocks)

    @invariant()
    def counts_add_up(self) -> None:
        used = {block for blocks, _ in self.held for block in blocks}
        assert self.pool.used == len(used)
        assert self.pool.available == TOTAL - len(used)

    @invariant()
    def holders_keep_their_content(self) -> None:
        for blocks, hashes in self.held:
            assert [self.content[block] for block in blocks[: len(hashes)]] == hashes
            assert self.pool.lookup(hashes) == blocks[: len(hashes)]

    @invariant()
    def a_parent_is_cached_before_its_children(self) -> None:
        seen: set[int | None] = {None}
        for block_hash in self.pool.snapshot():
            assert self.parents[block_hash] in seen
            seen.add(block_hash)

    @invariant()
    def events_tell_the_cache(self) -> None:
        known: set[int] = set()
        for event in self.events:
            if isinstance(event, BlocksStored):
                assert known.isdisjoint(event.block_hashes)
                known |= set(event.block_hashes)
            else:
                assert isinstance(event, BlocksRemoved)
                assert known >= set(event.block_hashes)
                known -= set(event.block_hashes)
        assert known == set(self.pool.snapshot())


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_evicts_the_least_recently_held_and_children_first() -> None:
    pool = BlockPool(4)
    old, new = block_hashes([1] * 4, 2, "m"), block_hashes([2] * 4, 2, "m")
    for hashes in (old, new):
        blocks = pool.allocate(2)
        assert blocks is not None
        pool.publish(blocks, hashes)
        pool.release(blocks)
    pool.allocate(1)
    assert pool.snapshot() == [old[0], *new]
    pool.allocate(1)
    assert pool.snapshot() == new


def test_refuses_what_does_not_fit() -> None:
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.reserve([], 3) is None
    assert pool.available == 2


def test_idle_hits_are_not_counted_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks, [11])
    pool.release(blocks)
    assert pool.reserve([11], 3) is None
    reserved = pool.reserve([11], 2)
    assert reserved is not None
    assert (reserved.hits, pool.available) == (1, 0)


def test_a_block_is_released_once() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="held by nobody"):
        pool.release(blocks)
