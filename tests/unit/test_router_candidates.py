"""Candidates are what the worker, its cache and its reservations come to, at one instant."""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.types import BlocksStored, Load, Member, Role, State, WorkerNews
from services.router.candidates import Candidates, requests_of, with_room, works_of
from services.router.cost import CostConfig, Work, placement_seconds
from services.router.planner import Decision, Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policies import KvAware
from services.router.policy import Candidate, Demand
from services.router.reservations import Ledger, Life
from services.router.state import CAPACITY_LABEL, EVENTS_LABEL, Fleet
from services.router.worker import DEFAULT_MAX_REQUESTS, WorkerState

PREFILL_US = 50.0


class Rig:
    """Workers of one role, d0 and so on, of the given blocks per worker."""

    def __init__(self, *total_blocks: int, role: Role = Role.DECODE, **labels: str) -> None:
        self.ledger = Ledger()
        self.fleet = Fleet(self.ledger)
        self.role = role
        self.labels = labels
        self.lives = [Life(f"d{at}", "e1") for at in range(len(total_blocks))]
        self.announce(*total_blocks)
        for life in self.lives:
            self.tell(life, 1)

    def announce(self, *total_blocks: int) -> None:
        self.fleet.update(
            Member(
                id=life.worker_id,
                role=self.role,
                epoch=life.epoch,
                address=life.worker_id,
                state=State.READY,
                model="m",
                block_size=16,
                total_blocks=blocks,
                labels=self.labels,
            )
            for life, blocks in zip(self.lives, total_blocks, strict=True)
        )

    def tell(self, life: Life, sequence: int, *events: BlocksStored | Load) -> None:
        self.fleet.apply(life, WorkerNews(life.worker_id, life.epoch, sequence, events))

    @property
    def workers(self) -> Sequence[WorkerState]:
        return self.fleet.workers()

    def candidates(
        self, demand: Demand, overlaps: Mapping[int, int], completion: int = 0, limit: int = 0
    ) -> Candidates:
        return with_room(
            self.fleet.standings(self.workers),
            demand,
            overlaps,
            completion=completion,
            max_requests=limit,
            prefill_us=PREFILL_US,
        )


def by_hand(
    rig: Rig, demand: Demand, overlaps: Mapping[int, int], completion: int, limit: int
) -> list[Candidate]:
    """Return what `with_room` is to return, one worker after the other and from nothing kept."""
    found = []
    for worker in rig.workers:
        held, size = rig.ledger.held(worker.life), worker.block_size
        requests = held.requests + worker.others
        if requests >= (limit or worker.capacity or DEFAULT_MAX_REQUESTS):
            continue
        cached = overlaps.get(worker.seat, 0) * size if size == demand.block_size else 0
        uncached = demand.prompt_tokens - cached
        free = (worker.total_blocks - held.prefill_blocks - worker.cached_blocks()) * size
        evicted = max(0, uncached + completion - max(0, free)) if worker.total_blocks else 0
        decoding = held.present + worker.others if rig.role is Role.DECODE else 0
        holding = held.decode_blocks + worker.other_blocks
        work = Work(
            uncached,
            held.prefill_blocks * size,
            decoding,
            holding * size,
            completion,
            evicted,
            worker.prefill_us or PREFILL_US,
        )
        found.append(
            Candidate(worker, held.prefill_blocks + holding, requests, cached, work),
        )
    return found


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_candidates_are_what_one_works_out_by_hand(data: st.DataObject) -> None:
    few = st.integers(0, 6)
    totals = data.draw(st.lists(st.sampled_from([0, 10, 40]), min_size=1, max_size=4))
    role = data.draw(st.sampled_from([Role.DECODE, Role.PREFILL]))
    rig = Rig(*totals, role=role, **{CAPACITY_LABEL: data.draw(st.sampled_from(["", "3"]))})
    for life in rig.lives:
        for _ in range(data.draw(st.integers(0, 3))):
            taken = rig.ledger.reserve(life, data.draw(few), None, data.draw(few))
            if data.draw(st.booleans()):
                rig.ledger.prefilled(taken)
        load = Load(data.draw(few), data.draw(few), 20)
        rig.tell(life, 2, BlocksStored(range(data.draw(few))), load)
        if data.draw(st.booleans()):
            rig.fleet.computed(life, 1000, 0.2)
    demand = Demand("r", "m", data.draw(st.integers(100, 900)), 0, (), data.draw(st.just(16)))
    overlaps = {worker.seat: data.draw(few) for worker in rig.workers}
    completion, limit = data.draw(st.integers(0, 300)), data.draw(st.sampled_from([0, 2]))

    found = rig.candidates(demand, overlaps, completion, limit)

    expected = by_hand(rig, demand, overlaps, completion, limit)
    assert list(found) == expected
    assert [found[at] for at in range(len(found))] == expected
    assert [Work._make(work) for work in works_of(found)] == [c.work for c in expected]


def test_what_candidates_say_has_its_names() -> None:
    rig = Rig(100, 0)
    found = rig.candidates(Demand("r", "m", 100, 0, (), 16), {0: 3}, completion=20)

    first, second = found
    assert (first.id, first.cached_tokens, first.work.uncached) == ("d0", 48, 52)
    assert (second.id, second.cached_tokens, second.work.uncached) == ("d1", 0, 100)
    assert second.work.completion == 20
    assert first.work.prefill_us == PREFILL_US
    assert isinstance(first, Candidate)
    assert isinstance(found[1].work, Work)
    assert found[-1] == second
    assert list(found[1:]) == [second]
    assert len(found) == len(found[:]) == 2
    with pytest.raises(IndexError):
        found[2]


def test_hashes_of_another_block_size_are_not_counted() -> None:
    (candidate,) = Rig(100).candidates(Demand("r", "m", 100, 0, (), 32), {0: 3})
    assert candidate.cached_tokens == 0


def test_what_happens_later_does_not_change_them() -> None:
    rig = Rig(100, 100)
    found = rig.candidates(Demand("r", "m", 100, 0, (), 16), {})
    before = list(found)

    rig.ledger.reserve(rig.lives[0], 5, None, 7)
    rig.tell(rig.lives[1], 2, Load(3, 0, 30))
    assert list(found) == before

    after = rig.candidates(Demand("r", "m", 100, 0, (), 16), {})
    assert [c.load_blocks for c in after] == [12, 30]


def test_scores_of_a_list_are_those_of_candidates() -> None:
    rig = Rig(100, 40, 0)
    rig.ledger.reserve(rig.lives[1], 5, None, 7)
    demand, costs = Demand("r", "m", 900, 0, (), 16), CostConfig()
    found = rig.candidates(demand, {0: 3}, completion=64)

    scores = KvAware().score(found, demand, costs)
    assert scores == KvAware().score(list(found), demand, costs)
    assert scores == placement_seconds([c.work for c in found], costs)


def test_the_ledger_tells_each_change_once() -> None:
    ledger, decode, prefill = Ledger(), Life("d0", "e1"), Life("p0", "e1")
    assert not ledger.changed()
    taken = ledger.reserve(decode, 1, prefill, 1)
    assert set(ledger.changed()) == {decode, prefill}
    assert not ledger.changed()
    ledger.prefilled(taken)
    assert set(ledger.changed()) == {decode, prefill}
    ledger.prefilled(taken)
    assert not ledger.changed()
    ledger.release(taken)
    assert decode in ledger.changed()
    ledger.release(taken)
    assert not ledger.changed()
    ledger.forget(decode)
    assert set(ledger.changed()) == {decode}


def test_a_prompt_that_nobody_tells_of_weighs_once_it_is_computed() -> None:
    rig = Rig(10, **{EVENTS_LABEL: "no"})
    (worker,) = rig.workers
    expected = rig.fleet.expect(worker, tuple(range(8)), 16)
    assert expected is not None
    demand = Demand("r", "m", 64, 0, (), 16)
    assert rig.candidates(demand, {})[0].work.evicted == 0

    expected.computed()
    assert rig.candidates(demand, {})[0].work.evicted == 32


def test_a_decision_does_not_make_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(*[100] * 40)

    def make_all(_: Candidates) -> None:
        raise AssertionError("all candidates were made")

    monkeypatch.setattr(Candidates, "__iter__", make_all)
    planner = Planner(rig.fleet, rig.ledger, RoutingConfig(), Policies("kv"), random.Random(1))

    decision = planner.plan(Demand("r", "m", 100, 0, (), 16))

    assert isinstance(decision, Decision)
    assert len(decision.decode_candidates) == len(decision.decode_scores) == 40
    assert decision.chosen == decision.decode_candidates[0].work


def test_those_that_fit_are_what_they_were() -> None:
    rig = Rig(100, 100, 100)
    rig.ledger.reserve(rig.lives[2], 3, None, 1)
    demand = Demand("r", "m", 100, 10, (), 16)
    found = rig.candidates(demand, {rig.workers[2].seat: 2})
    some = found.where(lambda worker: worker.id != "d1")

    assert list(some) == [found[0], found[2]]
    assert requests_of(some) == requests_of(list(some)) == [0, 1]
    assert list(works_of(some)) == [each.work for each in some]
