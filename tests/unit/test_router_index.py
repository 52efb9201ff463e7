"""Which worker has which blocks: the index against a plain set for each worker."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.index import Claim, PrefixIndex, Recent

BOUND = 12
BLOCKS = st.lists(st.integers(0, 20), max_size=8)


def leading(have: set[int], hashes: list[int]) -> int:
    count = 0
    for block in hashes:
        if block not in have:
            break
        count += 1
    return count


@dataclass
class Told:
    """What a seat was told to have, and what is expected of it."""

    stored: set[int] = field(default_factory=set)
    claims: list[Claim] = field(default_factory=list)


class IndexMachine(RuleBasedStateMachine):
    """Any order of events, of seats that come and go, with sweeps in between."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.seats: dict[int, Told] = {}
        self.left: list[Claim] = []

    @precondition(lambda self: len(self.seats) < 5)
    @rule()
    def open(self) -> None:
        seat = self.index.open()
        assert seat not in self.seats
        self.seats[seat] = Told()

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(sorted(self.seats)))
        self.index.close(seat)
        self.left += self.seats.pop(seat).claims

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), hashes=BLOCKS)
    def store(self, data: st.DataObject, hashes: list[int]) -> None:
        seat = data.draw(st.sampled_from(sorted(self.seats)))
        self.index.store(seat, hashes, BOUND)
        have = self.seats[seat].stored
        for block in hashes:
            if len(have) < BOUND:
                have.add(block)

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), hashes=BLOCKS)
    def remove(self, data: st.DataObject, hashes: list[int]) -> None:
        seat = data.draw(st.sampled_from(sorted(self.seats)))
        self.index.remove(seat, hashes)
        self.seats[seat].stored.difference_update(hashes)

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), hashes=BLOCKS)
    def expect(self, data: st.DataObject, hashes: list[int]) -> None:
        seat = data.draw(st.sampled_from(sorted(self.seats)))
        self.seats[seat].claims.append(self.index.expect(seat, hashes))

    @precondition(lambda self: self.left or any(t.claims for t in self.seats.values()))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        owners = [self.left, *(t.claims for t in self.seats.values())]
        owner = data.draw(st.sampled_from([claims for claims in owners if claims]))
        self.index.settle(owner.pop(0))

    @rule(step=st.integers(1, 30))
    def sweep(self, step: int) -> None:
        self.index.sweep(step)

    @rule(hashes=BLOCKS)
    def look(self, hashes: list[int]) -> None:
        expected = {}
        for seat, told in self.seats.items():
            have = told.stored.union(*(claim.hashes for claim in told.claims))
            if count := leading(have, hashes):
                expected[seat] = count
        assert self.index.overlaps(hashes) == expected

    @invariant()
    def every_seat_has_what_it_was_told(self) -> None:
        for seat, told in self.seats.items():
            assert self.index.hashes(seat) == told.stored
            assert self.index.counts[seat] == len(told.stored)
            assert self.index.stored(seat, range(21)) == leading(told.stored, list(range(21)))

    def teardown(self) -> None:
        for claim in [*self.left, *(c for t in self.seats.values() for c in t.claims)]:
            self.index.settle(claim)
        assert self.index.expected == 0
        for seat in self.seats:
            self.index.close(seat)
        for _ in range(6):
            self.index.sweep()
        assert len(self.index) == 0
        assert self.index.empty
        reused = [self.index.open() for _ in range(len(self.index.counts))]
        assert sorted(reused) == list(range(len(self.index.counts)))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)


def test_one_walk_gives_the_overlap_of_all() -> None:
    index = PrefixIndex()
    seats = [index.open() for _ in range(200)]
    for seat in seats:
        index.store(seat, range(seat % 7), 100)

    assert index.overlaps(range(10)) == {seat: seat % 7 for seat in seats if seat % 7}


def test_a_block_counts_only_with_all_before_it() -> None:
    index = PrefixIndex()
    seat = index.open()
    index.store(seat, (1, 3, 4), 10)

    assert index.overlaps((1, 2, 3, 4)) == {seat: 1}
    assert index.overlaps((2, 3)) == {}
    assert index.overlaps(()) == {}


def test_a_closed_seat_is_out_of_all_answers_before_its_memory_is() -> None:
    index = PrefixIndex()
    gone, stays = index.open(), index.open()
    index.store(gone, range(100), 100)
    index.store(stays, range(50), 100)

    index.close(gone)

    assert index.overlaps(range(100)) == {stays: 50}
    assert len(index) == 100
    assert index.open() not in (gone, stays)
    for _ in range(10):
        index.sweep(20)
    assert len(index) == 50
    assert index.open() == gone
    assert index.overlaps(range(100)) == {stays: 50}


def test_a_seat_is_not_given_away_while_something_is_expected_of_it() -> None:
    index = PrefixIndex()
    seat = index.open()
    claim = index.expect(seat, (1, 2))
    index.close(seat)
    other = index.open()

    assert other != seat
    assert index.overlaps((1, 2)) == {}
    index.settle(claim)
    assert index.open() == seat
    assert index.overlaps((1, 2)) == {}


def test_what_is_expected_counts_until_it_is_settled() -> None:
    index = PrefixIndex()
    seat = index.open()
    index.store(seat, (1,), 10)
    claim = index.expect(seat, (1, 2, 3))

    assert index.overlaps((1, 2, 3)) == {seat: 3}
    index.store(seat, (2,), 10)
    index.settle(claim)
    assert index.overlaps((1, 2, 3)) == {seat: 2}
    assert index.expected == 0


@pytest.mark.parametrize("prompts", [[[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [5, 6], [1, 2, 4]]])
def test_recent_blocks_go_least_recently_used_first_and_children_before_parents(
    prompts: list[list[int]],
) -> None:
    recent = Recent(5)
    forgotten = [block for prompt in prompts for block in recent.use(prompt)]

    assert forgotten == ([] if len(prompts) == 2 else [3])


def test_recent_blocks_are_bounded() -> None:
    recent = Recent(4)

    assert recent.use(range(10)) == []
    assert recent.use([20, 21]) == [3, 2]
