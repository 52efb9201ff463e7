"""Whose turn it is in a line: fair between keys, strict between priorities, and nobody starves."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.fair import QUANTUM, Line, Waiter, parse_weights
from services.router.pace import EVIDENCE, Pace
from services.router.policy import Demand

KEYS = ("", "a", "b", "c")


class Rig:
    """A line of which a test says who comes, and sees who is served."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.line = Line(lambda key: (weights or {}).get(key, 1.0), 0.0)
        self._arrivals = itertools.count(1)

    def add(
        self, key: str, cost: float = 100.0, priority: int = 0, excluded: Sequence[str] = ()
    ) -> Waiter:
        demand = Demand("r", "m", 1, excluded=frozenset(excluded), priority=priority, fair_key=key)
        waiter = Waiter(demand, cost, 0.0, None, 60.0)
        waiter.position = self.line.position(demand)
        waiter.arrival = next(self._arrivals)
        self.line.add(waiter)
        return waiter

    def serve(self) -> Waiter:
        waiter = self.line.choose()
        assert waiter is not None
        assert self.line.choose() is waiter
        self.line.charge(waiter)
        self.line.remove(waiter)
        return waiter

    def serve_all(self) -> list[Waiter]:
        return [self.serve() for _ in range(len(self.line))]


def keys(waiters: Sequence[Waiter]) -> str:
    return "".join(w.demand.fair_key for w in waiters)


def test_a_crowd_of_one_key_delays_another_by_a_moment() -> None:
    rig = Rig()
    for _ in range(500):
        rig.add("a", cost=QUANTUM)
    rig.serve()

    modest = rig.add("b", cost=QUANTUM)

    assert modest.position == 2
    assert modest in [rig.serve(), rig.serve()]


def test_keys_with_equal_requests_take_turns() -> None:
    rig = Rig()
    for key in "aaaabbcc":
        rig.add(key, cost=QUANTUM)

    assert keys(rig.serve_all()) == "abcabcaa"


def test_who_asks_for_more_work_is_served_less_often() -> None:
    rig = Rig()
    for _ in range(40):
        rig.add("a", cost=4 * QUANTUM)
        rig.add("b", cost=QUANTUM)

    served = Counter(keys([rig.serve() for _ in range(40)]))

    assert served == {"a": 8, "b": 32}


def test_a_weight_gives_so_many_times_as_much() -> None:
    rig = Rig({"a": 3.0})
    for _ in range(40):
        rig.add("a", cost=QUANTUM)
        rig.add("b", cost=QUANTUM)

    served = Counter(keys([rig.serve() for _ in range(40)]))

    assert served == {"a": 30, "b": 10}


def test_a_better_priority_goes_first_whoevers_it_is() -> None:
    rig = Rig()
    for key, priority in [("a", 1), ("b", 0), ("a", 0), ("b", -1), ("b", 0)]:
        rig.add(key, QUANTUM, priority)

    served = [(w.demand.fair_key, w.demand.priority) for w in rig.serve_all()]

    assert served == [("b", -1), ("b", 0), ("a", 0), ("b", 0), ("a", 1)]


def test_ever_new_keys_starve_nobody() -> None:
    rig = Rig()
    patient = [rig.add("a", cost=4 * QUANTUM), rig.add("a", cost=4 * QUANTUM)]
    fresh = map(str, itertools.count())

    for _ in range(500):
        for key in itertools.islice(fresh, 2):
            rig.add(key, cost=1)
        rig.serve()
        if not any(w.in_line for w in patient):
            return
    raise AssertionError("starved")


def test_one_large_request_after_the_other_is_no_way_to_get_more() -> None:
    rig = Rig()
    for _ in range(300):
        rig.add("b", cost=QUANTUM)
    served: Counter[str] = Counter()
    while served["b"] < 200 * QUANTUM:
        if served["a"] <= served["b"] and not any(w.demand.fair_key == "a" for w in rig.line):
            rig.add("a", cost=10 * QUANTUM)
        waiter = rig.serve()
        served[waiter.demand.fair_key] += int(waiter.cost)

    assert 0.8 < served["a"] / served["b"] < 1.2


def test_debts_are_forgiven_once_nobody_waits() -> None:
    rig = Rig()
    rig.add("a", cost=100 * QUANTUM)
    rig.serve()

    for key in "ab":
        rig.add(key, cost=QUANTUM)

    assert keys(rig.serve_all()) == "ab"


def test_the_memory_of_debts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.fair.MAX_DEBTORS", 10)
    rig = Rig()
    rig.add("stays", cost=1e9)
    rig.add("stays", cost=1e9)
    for number in range(25):
        rig.add(str(number), cost=1e6)
    while any(w.demand.fair_key != "stays" for w in rig.line):
        rig.serve()

    (level,) = rig.line._levels.values()
    assert len(level._debts) == 10


def test_only_those_who_exclude_what_is_blocked_are_passed_by() -> None:
    rig = Rig()
    picky = rig.add("a", excluded=["d0"])
    pickier = rig.add("a", excluded=["d0", "d1"])
    other = rig.add("a", excluded=["d1"])
    plain = rig.add("a")

    blocked = [frozenset({"d0"})]
    assert rig.line.choose() is picky
    assert rig.line.choose(blocked) is other
    blocked.append(frozenset({"d1"}))
    assert rig.line.choose(blocked) is plain
    rig.line.remove(plain)
    assert rig.line.choose(blocked) is None
    assert rig.line.choose([frozenset({"d1"})]) is picky
    assert pickier.in_line


def test_the_last_of_a_key_is_its_newest_of_the_worst_priority() -> None:
    rig = Rig()
    rig.add("a", priority=1)
    last = rig.add("a", priority=1, excluded=["d0"])
    rig.add("a")
    rig.add("b", priority=2)

    assert rig.line.last_of("a") is last
    assert rig.line.last_of("c") is None


requests = st.tuples(st.sampled_from(KEYS), st.integers(1, 5000), st.integers(-1, 1))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from([0.25, 1.0, 2.0, 7.5]), min_size=2),
    st.data(),
)
def test_while_keys_wait_their_shares_differ_by_little(
    weights: Mapping[str, float], data: st.DataObject
) -> None:
    rig = Rig(weights)
    costs = st.integers(1, 3000)
    for key in weights:
        rig.add(key, data.draw(costs))
        rig.add(key, data.draw(costs))
    served = dict.fromkeys(weights, 0.0)
    for _ in range(60):
        waiter = rig.serve()
        key = waiter.demand.fair_key
        served[key] += waiter.cost / weights[key]
        rig.add(key, data.draw(costs))

        bound = QUANTUM + 3000 / min(weights.values())
        assert max(served.values()) - min(served.values()) <= bound


@settings(max_examples=200, deadline=None)
@given(st.lists(requests, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_all_are_served_once_in_their_keys_order_whatever_happens(
    arrivals: Sequence[tuple[str, int, int]], chance: object
) -> None:
    rig, served, gone = Rig(), [], set()
    draw = chance.random  # type: ignore[attr-defined]
    for key, cost, priority in arrivals:
        waiter = rig.add(key, cost, priority)
        if draw() < 0.3:
            served.append(rig.serve())
        if draw() < 0.2 and waiter.in_line:
            rig.line.remove(waiter)
            gone.add(waiter)
        assert len(rig.line) == len(list(rig.line))
    served += rig.serve_all()

    assert len(served) + len(gone) == len(arrivals)
    assert len(set(served) | gone) == len(arrivals)
    assert rig.line.choose() is None
    for _, group in itertools.groupby(sorted(served, key=_lane), key=_lane):
        order = [w.arrival for w in sorted(group, key=served.index)]
        assert order == sorted(order)


def _lane(waiter: Waiter) -> tuple[int, str]:
    return waiter.demand.priority, waiter.demand.fair_key


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(KEYS), max_size=40), st.sampled_from(KEYS))
def test_the_position_is_about_when_the_turn_comes(others: Sequence[str], key: str) -> None:
    rig = Rig()
    for other in others:
        rig.add(other, QUANTUM)
    newcomer = rig.add(key, QUANTUM)

    turn = rig.serve_all().index(newcomer) + 1

    assert abs(turn - newcomer.position) < len(KEYS)


@pytest.mark.parametrize("entry", ["a", "a=", "a=x", "a=0", "a=-1", "a=inf", "a=nan", ""])
def test_wrong_weights_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is not key=weight"):
        parse_weights([entry])


def test_weights_are_read() -> None:
    assert parse_weights(["a=2", "=0.5", "b=c=3"]) == {"a": 2.0, "": 0.5, "b=c": 3.0}


def test_a_pace_says_nothing_before_it_knows() -> None:
    pace = Pace(10.0)
    for number in range(EVIDENCE):
        assert pace.wait(5) is None
        pace.served(1, 10.5 + number * 0.5)

    assert pace.wait(5) == pytest.approx(2.5)


def test_a_pace_follows_a_change_and_counts_who_came_at_once() -> None:
    pace = Pace(0.0)
    pace.served(10, 10.0)
    assert pace.wait(1) == pytest.approx(1.0)
    for number in range(100):
        pace.served(1, 10.1 + number / 10)

    assert pace.wait(10) == pytest.approx(1.0, rel=0.02)
