"""Every policy that comes with the router, and one that does not."""

import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import pytest

from kvmesh.config import ConfigError
from kvmesh.types import Member, Role, State
from services.router import plugins
from services.router.cost import CostConfig, Work
from services.router.plugins import Policies
from services.router.policies import (
    SESSION_FLOOR,
    KvAware,
    PowerOfTwo,
    Random,
    RoundRobin,
    Session,
)
from services.router.policy import Candidate, Demand, LowestScore, Policy
from services.router.worker import WorkerState

COSTS = CostConfig()
DOCS = Path(__file__).parents[2] / "docs" / "routing.md"


def candidate(name: str, load: float = 0, requests: int = 0, **figures: float) -> Candidate:
    member = Member(name, Role.DECODE, "e1", name, State.READY)
    work = Work(**(dict.fromkeys(Work._fields, 0.0) | {"prefill_us": 100.0} | figures))
    return Candidate(WorkerState(member, None), load, requests, 0, work)


def pool(*loads: float) -> list[Candidate]:
    return [candidate(f"d{at}", load) for at, load in enumerate(loads)]


def demand(session: str = "", priority: int = 0) -> Demand:
    return Demand("r", "m", 10, session=session, priority=priority)


def picks(
    policy: Policy,
    candidates: list[Candidate],
    ask: Callable[[int], Demand] = lambda _: demand(),
    times: int = 1000,
    costs: CostConfig = COSTS,
) -> Counter[str]:
    rng = random.Random(1)
    counts: Counter[str] = Counter()
    for number in range(times):
        scores = policy.score(candidates, ask(number), costs)
        counts[candidates[policy.pick(scores, costs, rng)].id] += 1
    return counts


def test_kv_takes_the_worker_that_has_most_cached() -> None:
    candidates = [
        candidate("d0", uncached=1000),
        candidate("d1", uncached=100),
        candidate("d2", uncached=600),
    ]

    assert set(picks(KvAware(), candidates)) == {"d1"}


def test_a32_kv_leaves_a_cached_prefix_when_waiting_for_it_takes_longer() -> None:
    cold = candidate("d0", uncached=1000)

    assert set(picks(KvAware(), [cold, candidate("d1", uncached=100, queued=1300)])) == {"d1"}
    assert set(picks(KvAware(), [cold, candidate("d1", uncached=100, queued=1400)])) == {"d0"}


def test_kv_evicts_where_least_is_lost() -> None:
    candidates = [candidate("d0", uncached=1000, evicted=500), candidate("d1", uncached=1000)]

    assert set(picks(KvAware(), candidates)) == {"d1"}


def test_a32_equals_are_drawn_by_lot() -> None:
    counts = picks(KvAware(), pool(0, 0, 0, 0))

    assert min(counts.values()) > 150


def test_temperature_gives_worse_workers_a_chance_that_shrinks_with_the_difference() -> None:
    candidates = [candidate(f"d{n}", uncached=100 + 100 * n) for n in range(4)]
    warm = CostConfig(temperature=0.5)

    counts = picks(KvAware(), candidates, costs=warm)

    assert [name for name, _ in counts.most_common()] == ["d0", "d1", "d2", "d3"]
    assert set(picks(KvAware(), candidates)) == {"d0"}


def test_random_takes_each_as_often() -> None:
    counts = picks(Random(), pool(0, 1000, 5))

    assert min(counts.values()) > 270


def test_power_of_two_never_takes_the_worst_and_mostly_the_best() -> None:
    counts = picks(PowerOfTwo(), pool(1, 2, 3, 4))

    assert "d3" not in counts
    assert counts["d0"] > counts["d1"] > counts["d2"] > 100
    assert set(picks(PowerOfTwo(), pool(7))) == {"d0"}


def test_round_robin_takes_each_in_turn() -> None:
    policy, candidates = RoundRobin(), pool(0, 9, 5)
    turns = [next(iter(picks(policy, candidates, times=1))) for _ in range(9)]

    assert turns[:3] == turns[3:6] == turns[6:]
    assert set(turns) == {"d0", "d1", "d2"}


def test_a_session_stays_on_its_worker_whatever_the_loads() -> None:
    for name in ("alice", "bob", "carol"):
        homes = set(picks(Session(), pool(0, 9, 5), lambda _, n=name: demand(n), 5))  # type: ignore[misc]
        homes |= set(picks(Session(), pool(9, 0, 5), lambda _, n=name: demand(n), 5))  # type: ignore[misc]
        assert len(homes) == 1


def test_sessions_are_spread() -> None:
    counts = picks(Session(), pool(0, 0, 0, 0), lambda number: demand(f"user {number}"))

    assert min(counts.values()) > 200


def test_only_the_sessions_of_a_worker_that_goes_are_moved() -> None:
    def homes(candidates: list[Candidate]) -> list[str]:
        return [
            next(iter(picks(Session(), candidates, lambda _, n=n: demand(f"user {n}"), 1)))  # type: ignore[misc]
            for n in range(200)
        ]

    before, after = homes(pool(0, 0, 0, 0)), homes(pool(0, 0, 0, 0)[:3])

    moved = [(was, now) for was, now in zip(before, after, strict=True) if was != now]
    assert {was for was, _ in moved} == {"d3"}
    assert len({now for _, now in moved}) == 3


def test_a32_a_worker_with_far_more_than_its_share_is_passed_over() -> None:
    ask = demand("alice")
    home = next(iter(picks(Session(), pool(0, 0, 0), lambda _: ask, 1)))
    even = [candidate(f"d{n}", requests=40) for n in range(3)]
    uneven = [c._replace(requests=40 + 40 * (c.id == home)) for c in even]
    few = [c._replace(requests=(SESSION_FLOOR - 1) * (c.id == home)) for c in even]

    assert set(picks(Session(), even, lambda _: ask)) == {home}
    assert set(picks(Session(), few, lambda _: ask)) == {home}
    elsewhere = set(picks(Session(), uneven, lambda _: ask))
    assert len(elsewhere) == 1
    assert home not in elsewhere


def test_requests_without_a_session_go_to_the_least_loaded() -> None:
    assert set(picks(Session(), pool(3, 1, 2))) == {"d1"}


def test_models_have_policies_of_their_own() -> None:
    policies = Policies("kv", ("big=session", "path/with=sign=random"))

    assert isinstance(policies.make("big"), Session)
    assert isinstance(policies.make("path/with=sign"), Random)
    assert isinstance(policies.make("small"), KvAware)
    assert (policies.name("big"), policies.name("small")) == ("session", "kv")


@pytest.mark.parametrize("entry", ["big", "=random", "big=fastest"])
def test_a_wrong_policy_of_a_model_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"routing\.policy"):
        Policies("kv", (entry,))


def test_the_policy_of_the_documentation_works_as_a_plug_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 30
    module = ModuleType("my_package_express")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    point = EntryPoint("express", "my_package_express:Express", plugins.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: EntryPoints([point]).select(group=group)
    )

    policy = Policies("express").make("m")

    assert isinstance(policy, LowestScore)
    assert set(picks(policy, pool(0, 0, 0, 0))) == {"d1", "d2", "d3"}
    assert set(picks(policy, pool(0, 0, 0, 0), lambda _: demand(priority=-1))) == {
        f"d{n}" for n in range(4)
    }
