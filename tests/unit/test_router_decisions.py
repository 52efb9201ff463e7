"""The router's memory of its decisions: what it keeps, lets pass, and drops."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvmesh.errors import CancelledByCallerError, OverloadedError, UnknownModelError
from kvmesh.types import Member, Plan, Role, Worker
from services.router.cost import Work
from services.router.decisions import (
    KEPT_CANDIDATES,
    MAX_BEHIND,
    MAX_FOLLOWERS,
    SORTED_AT_MOST,
    DecisionLog,
    DecisionsConfig,
    Entry,
    Filter,
    Outcome,
    best,
)
from services.router.planner import Decision
from services.router.policy import Candidate, Demand
from services.router.reservations import Ledger, Life
from services.router.worker import WorkerState


class Clock:
    """Shows each time once."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        raise AssertionError("decisions are dated, not timed, here")

    def wall(self) -> float:
        self.time += 1
        return self.time


@pytest.fixture
def log() -> DecisionLog:
    return memory()


def memory(kept: int = 100) -> DecisionLog:
    return DecisionLog(DecisionsConfig(kept=kept), lambda name: name == "m", Clock())


def demand(number: int = 0, **more: Any) -> Demand:
    hashes = tuple(range(1_000_000, 1_000_010))
    model = more.pop("model", "m")
    return Demand(f"r{number}", model, 100, block_hashes=hashes, block_size=16, **more)


def candidate(name: str, cached: int = 0) -> Candidate:
    member = Member(name, Role.DECODE, "e", "a:1", model="m", block_size=16)
    return Candidate(WorkerState(member, None), 7.0, 3, cached, Work(0, 0, 0, 0, 0, 0, 100))


def decision(decode: str = "d0", prefill: str = "", policy: str = "kv") -> Decision:
    ledger = Ledger()
    plan = Plan(
        Worker(decode, "e", "a:1"),
        Worker(prefill, "e", "a:2") if prefill else None,
        64,
        "why",
        policy,
        "configured",
    )
    prefills = [candidate(prefill)] if prefill else []
    return Decision(
        plan,
        ledger.reserve(Life(decode, "e"), 1, None, 0),
        policy,
        Work(0, 0, 0, 0, 0, 0, 100),
        [candidate(decode, 64)],
        [0.5],
        prefills,
        [0.25] * len(prefills),
    )


def add(log: DecisionLog, *numbers: int, **more: Any) -> None:
    for number in numbers:
        log.decided(demand(number), decision(**more), 0.0, 0)


def names(entries: Sequence[Entry]) -> list[str]:
    return [entry.request_id for entry in entries]


def test_a_plan_is_remembered_with_all_that_explains_it(log: DecisionLog) -> None:
    asked = demand(5, excluded=frozenset({"p9", "d9"}))
    entry = log.decided(asked, decision("d0", "p0"), 0.5, 3)
    assert log.recent(Filter(), None) == [entry]
    assert (entry.number, entry.time, entry.request_id, entry.model) == (1, 101.0, "r5", "m")
    assert (entry.outcome, entry.reason, entry.policy) == (Outcome.REMOTE, "configured", "kv")
    assert (entry.decode, entry.prefill) == ("d0", "p0")
    assert (entry.prompt_tokens, entry.expected_tokens, entry.cached_tokens) == (100, 64, None)
    assert (entry.waited, entry.position, entry.excluded) == (0.5, 3, ("d9", "p9"))
    (scored,) = entry.decode_candidates
    assert tuple(scored) == ("d0", 0.5, 64, 7.0, 3)
    assert [one.worker_id for one in entry.prefill_candidates] == ["p0"]


def test_a_refusal_is_remembered_with_its_reason(log: DecisionLog) -> None:
    entry = log.refused(demand(), OverloadedError("full"), 1.5, 2)
    assert (entry.outcome, entry.reason, entry.waited) == (Outcome.REFUSED, "OVERLOADED", 1.5)
    assert (entry.decode, entry.policy, entry.decode_candidates) == ("", "", ())
    left = log.refused(demand(), CancelledByCallerError("gone"), 0.0, 0)
    assert (left.outcome, left.reason) == (Outcome.CANCELLED, "CANCELLED")


def test_nothing_that_a_caller_wrote_is_kept(log: DecisionLog) -> None:
    log.refused(demand(model="my secret"), UnknownModelError("no such model"), 0.0, 0)
    add(log, 1)
    kept = repr(log.recent(Filter(), None))
    assert "secret" not in kept
    assert "1000000" not in kept  # a hash
    (refused, _) = log.recent(Filter(), None)
    assert refused.model == "other"


def test_a_long_request_id_is_cut(log: DecisionLog) -> None:
    asked = Demand("r" * 1000, "m", 1)
    assert len(log.refused(asked, OverloadedError("full"), 0.0, 0).request_id) == 128


def test_only_the_last_ones_are_kept() -> None:
    log = memory(kept=3)
    add(log, 1, 2, 3, 4, 5)
    assert names(log.recent(Filter(), None)) == ["r3", "r4", "r5"]
    assert [entry.number for entry in log.recent(Filter(), None)] == [3, 4, 5]


def test_the_memory_may_be_off() -> None:
    log = memory(kept=0)
    with log.follow(Filter()) as follower:
        add(log, 1)
        assert log.recent(Filter(), None) == []
        assert not follower.offer(log.refused(demand(), OverloadedError("full"), 0.0, 0))


@pytest.mark.parametrize(("most", "found"), [(None, 4), (0, 0), (2, 2), (9, 4)])
def test_the_newest_are_what_a_limit_leaves(log: DecisionLog, most: int | None, found: int) -> None:
    add(log, 1, 2, 3, 4)
    assert names(log.recent(Filter(), most)) == ["r1", "r2", "r3", "r4"][4 - found :]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Filter(), ["r1", "r2", "r3", "r4"]),
        (Filter(model="m"), ["r1", "r2", "r3", "r4"]),
        (Filter(model="n"), []),
        (Filter(worker="d1"), ["r2"]),
        (Filter(worker="p0"), ["r2"]),
        (Filter(policy="random"), ["r3"]),
        (Filter(request_id="r3"), ["r3"]),
        (Filter(outcomes=frozenset({Outcome.REMOTE})), ["r2"]),
        (Filter(outcomes=frozenset({Outcome.LOCAL, Outcome.REFUSED})), ["r1", "r3", "r4"]),
        (Filter(worker="d0", outcomes=frozenset({Outcome.REMOTE})), []),
    ],
)
def test_filters_let_pass_what_fits_all_of_them(
    log: DecisionLog, wanted: Filter, found: list[str]
) -> None:
    add(log, 1)
    add(log, 2, decode="d1", prefill="p0")
    add(log, 3, policy="random")
    log.refused(demand(4), OverloadedError("full"), 0.0, 0)
    assert names(log.recent(wanted, None)) == found


async def test_a_follower_gets_what_comes_and_nothing_else(log: DecisionLog) -> None:
    add(log, 1)
    with log.follow(Filter(policy="kv")) as follower:
        assert log.followers == 1
        waiting = asyncio.create_task(follower.next(10))
        await asyncio.sleep(0)
        assert not waiting.done()
        add(log, 2)
        add(log, 3, policy="random")
        dropped, entries = await waiting
        assert (dropped, names(entries)) == (0, ["r2"])
        add(log, *range(4, 9))
        assert names((await follower.next(3))[1]) == ["r4", "r5", "r6"]
        assert names((await follower.next(3))[1]) == ["r7", "r8"]
    assert log.followers == 0


async def test_a_slow_follower_loses_the_oldest_and_is_told_how_many(log: DecisionLog) -> None:
    with log.follow(Filter()) as slow, log.follow(Filter(request_id="r3")) as choosy:
        add(log, *range(MAX_BEHIND + 5))
        dropped, entries = await slow.next(2)
        assert (dropped, names(entries)) == (5, ["r5", "r6"])
        assert (await slow.next(1))[0] == 0
        assert names((await choosy.next(9))[1]) == ["r3"]
    assert log.dropped == 5


def test_followers_are_few(log: DecisionLog) -> None:
    followers = [log.follow(Filter()) for _ in range(MAX_FOLLOWERS)]
    for one in followers:
        one.__enter__()
    with pytest.raises(OverloadedError), log.follow(Filter()):
        pass
    followers[0].__exit__(None, None, None)
    with log.follow(Filter()):
        assert log.followers == MAX_FOLLOWERS


def test_the_best_candidates_are_the_lowest_scores_in_order() -> None:
    candidates = [candidate(f"d{at}") for at in range(9)]
    scores = [5.0, 1.0, 4.0, 1.0, 3.0, 9.0, 2.0, 8.0, 7.0]
    found = best(candidates, scores)
    assert len(found) == KEPT_CANDIDATES
    assert [one.worker_id for one in found] == ["d1", "d3", "d6", "d4"]
    assert [one.worker_id for one in best(candidates[:2], scores[:2])] == ["d1", "d0"]


def test_the_best_of_very_many_are_the_same() -> None:
    count = SORTED_AT_MOST + 1
    candidates = [candidate(f"d{at}") for at in range(count)]
    scores = [float((at * 7919) % count) for at in range(count)]
    ranked = sorted(range(count), key=scores.__getitem__)[:KEPT_CANDIDATES]
    assert [one.worker_id for one in best(candidates, scores)] == [f"d{at}" for at in ranked]
