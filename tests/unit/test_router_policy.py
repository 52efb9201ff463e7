"""How one worker is chosen: filter, score, pick, remote or local prefill."""

import random
from collections import Counter
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from kvmesh.config import ConfigError
from kvmesh.types import BlocksStored, Load, Member, Role, State, WorkerNews
from services.router import plugins, policies
from services.router.planner import Blocked, Decision, Planner, Prefill, RoutingConfig
from services.router.plugins import Policies, find_policy
from services.router.policy import Demand
from services.router.reservations import Ledger, Life
from services.router.state import Fleet


def worker(name: str, role: Role = Role.DECODE, **fields: object) -> Member:
    defaults: dict[str, object] = {
        "epoch": "e1",
        "address": f"{name}:1",
        "state": State.READY,
        "model": "m",
        "block_size": 16,
        "total_blocks": 1000,
        "layout_fingerprint": "layout",
    }
    return Member(id=name, role=role, **(defaults | fields))  # type: ignore[arg-type]


class Rig:
    """A fleet of live workers with a planner in front."""

    def __init__(self, *members: Member, by: str = "least_loaded", **routing: Any) -> None:
        self.ledger = Ledger()
        self.fleet = Fleet(self.ledger)
        self.fleet.update(members)
        for member in members:
            self.tell(member.id, 1)
        self.planner = Planner(
            self.fleet,
            self.ledger,
            RoutingConfig(policy=by, **routing),
            Policies(by),
            random.Random(7),
        )

    def tell(self, name: str, sequence: int, *events: Load | BlocksStored) -> None:
        self.fleet.apply(Life(name, "e1"), WorkerNews(name, "e1", sequence, events))

    def plan(self, prompt_tokens: int = 10, **fields: object) -> Decision:
        decision = self.planner.plan(demand(prompt_tokens, **fields))
        assert isinstance(decision, Decision)
        return decision


def demand(prompt_tokens: int = 10, **fields: object) -> Demand:
    return Demand("r", "m", prompt_tokens, **fields)  # type: ignore[arg-type]


def test_round_robin_gives_each_worker_the_same_share() -> None:
    rig = Rig(*(worker(f"d{i}") for i in range(4)), by="round_robin")

    names = [rig.plan().plan.decode.id for _ in range(40)]

    assert set(Counter(names).values()) == {10}
    assert names[:4] == names[4:8]


def test_a_policy_that_stays_keeps_its_turn_and_a_new_one_begins_afresh() -> None:
    rig = Rig(*(worker(f"d{i}") for i in range(3)), by="round_robin")
    turns = [rig.plan().plan.decode.id for _ in range(4)]
    again = Policies("random", ["m=round_robin"])

    rig.planner.configure(RoutingConfig(max_requests_per_worker=3), again)
    turns += [rig.plan().plan.decode.id for _ in range(5)]

    assert turns == turns[:3] * 3
    assert rig.planner.plan(demand()) is Blocked.FULL
    rig.planner.configure(RoutingConfig(policy="session"), Policies("session"))
    decisions = [rig.plan(session="s") for _ in range(3)]
    assert {each.policy for each in decisions} == {"session"}
    assert len({each.plan.decode.id for each in decisions}) == 1


def test_round_robin_keeps_its_turn_when_a_worker_leaves() -> None:
    rig = Rig(*(worker(f"d{i}") for i in range(3)), by="round_robin")
    while rig.plan().plan.decode.id != "d0":
        pass

    rig.fleet.update([worker("d0"), worker("d2")])

    assert [rig.plan().plan.decode.id for _ in range(3)] == ["d2", "d0", "d2"]


def test_a32_a_burst_of_equal_requests_is_spread_evenly() -> None:
    rig = Rig(*(worker(f"d{i}") for i in range(4)))

    share = Counter(rig.plan().plan.decode.id for _ in range(64))

    assert set(share.values()) == {16}


def test_a32_one_after_another_uses_every_worker() -> None:
    rig = Rig(worker("d0"), worker("d1"))
    rig.tell("d0", 2, BlocksStored((1, 2, 3)))
    share: Counter[str] = Counter()
    for _ in range(400):
        decision = rig.plan(64, block_hashes=(1, 2, 3), block_size=16)
        share[decision.plan.decode.id] += 1
        rig.ledger.release(decision.reservation)

    assert min(share["d0"], share["d1"]) > 150


def test_a32_the_idle_worker_is_chosen_over_one_with_long_jobs() -> None:
    rig = Rig(worker("d0"), worker("d1"))
    rig.tell("d0", 2, Load(running=4, used_blocks=800, total_blocks=1000))

    assert {rig.plan(1).plan.decode.id for _ in range(20)} == {"d1"}


def test_loads_are_never_clamped() -> None:
    rig = Rig(worker("d0"), worker("d1"))
    rig.tell("d0", 2, Load(running=100, waiting=200, used_blocks=1000, total_blocks=1000))
    rig.tell("d1", 2, Load(running=100, waiting=199, used_blocks=1000, total_blocks=1000))

    assert rig.plan().plan.decode.id == "d1"


def test_excluded_workers_are_not_chosen() -> None:
    rig = Rig(worker("d0"), worker("d1"), worker("p0", Role.PREFILL))

    decision = rig.plan(100, excluded=frozenset({"d0", "p0"}))

    assert decision.plan.decode.id == "d1"
    assert decision.plan.prefill is None
    assert rig.planner.plan(demand(excluded=frozenset({"d0", "d1"}))) is Blocked.NO_WORKER


def test_workers_of_another_model_are_not_chosen() -> None:
    rig = Rig(worker("d0", model="other"))

    assert rig.planner.plan(demand()) is Blocked.NO_WORKER


@pytest.mark.parametrize(
    ("labels", "configured", "room"), [({}, 3, 3), ({"max_requests": "2"}, 0, 2), ({}, 0, 512)]
)
def test_a_worker_takes_no_more_than_its_limit(
    labels: dict[str, str], configured: int, room: int
) -> None:
    rig = Rig(worker("d0", labels=labels), max_requests_per_worker=configured)

    decisions = [rig.plan() for _ in range(room)]

    assert rig.planner.plan(demand()) is Blocked.FULL
    rig.ledger.release(decisions[0].reservation)
    rig.plan()


def test_requests_of_others_take_room_too() -> None:
    rig = Rig(worker("d0"), max_requests_per_worker=4)
    rig.plan()
    rig.tell("d0", 2, Load(running=2, waiting=1, used_blocks=30))

    rig.plan()
    assert rig.planner.plan(demand()) is Blocked.FULL


@pytest.mark.parametrize(("tokens", "remote"), [(31, False), (32, True)])
def test_long_prompts_are_prefilled_remotely(tokens: int, remote: bool) -> None:
    rig = Rig(worker("d0"), worker("p0", Role.PREFILL))

    prefill = rig.plan(tokens).plan.prefill

    assert (prefill is not None) == remote


def test_what_decode_has_cached_is_not_prefilled_remotely() -> None:
    rig = Rig(worker("d0"), worker("p0", Role.PREFILL))
    rig.tell("d0", 2, BlocksStored(tuple(range(6))))

    plan = rig.plan(100, block_hashes=tuple(range(6)), block_size=16).plan

    assert plan.prefill is None
    assert plan.expected_cached_tokens == 96


def test_expected_cached_tokens_are_those_of_the_worker_that_prefills() -> None:
    rig = Rig(worker("d0"), worker("p0", Role.PREFILL))
    rig.tell("d0", 2, BlocksStored((0,)))
    rig.tell("p0", 2, BlocksStored((0, 1, 2)))

    plan = rig.plan(100, block_hashes=tuple(range(6)), block_size=16).plan

    assert plan.prefill is not None
    assert plan.expected_cached_tokens == 48


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ({}, {"layout_fingerprint": "another"}),
        ({}, {"layout_fingerprint": ""}),
        ({"layout_fingerprint": ""}, {"layout_fingerprint": ""}),
        ({}, {"model": "another"}),
        ({}, {"state": State.DRAINING}),
    ],
)
def test_no_hand_off_between_workers_that_do_not_fit(
    decode: dict[str, object], prefill: dict[str, object]
) -> None:
    rig = Rig(worker("d0", **decode), worker("p0", Role.PREFILL, **prefill))

    assert rig.plan(100).plan.prefill is None


def test_a_prefill_worker_without_room_leaves_the_prompt_to_decode() -> None:
    rig = Rig(worker("d0"), worker("d1"), worker("p0", Role.PREFILL), max_requests_per_worker=2)
    decisions = [rig.plan(100) for _ in range(3)]

    assert [d.plan.prefill is not None for d in decisions] == [True, True, False]
    rig.ledger.prefilled(decisions[0].reservation)
    assert rig.plan(100).plan.prefill is not None


def test_prefill_work_weighs_until_it_is_done() -> None:
    rig = Rig(worker("d0"), worker("p0", Role.PREFILL), worker("p1", Role.PREFILL))
    first = rig.plan(1600)
    second = rig.plan(160)
    assert first.plan.prefill is not None
    assert second.plan.prefill is not None
    assert first.plan.prefill.id != second.plan.prefill.id

    third = rig.plan(1600).plan.prefill
    assert third is not None
    assert third.id == second.plan.prefill.id
    rig.ledger.prefilled(first.reservation)
    fourth = rig.plan(160).plan.prefill
    assert fourth is not None
    assert fourth.id == first.plan.prefill.id


def test_by_cost_an_idle_decode_worker_prefills_and_a_busy_one_has_it_done() -> None:
    rig = Rig(worker("d0"), worker("p0", Role.PREFILL), prefill=Prefill.AUTO)
    idle = rig.plan(1000)
    assert idle.plan.prefill is None
    rig.ledger.prefilled(idle.reservation)

    rig.tell("d0", 2, Load(running=10, used_blocks=100, total_blocks=1000))
    rig.tell("p0", 2, Load(ticket_blocks=1, ticket_bytes=16_000))
    busy = [rig.plan(1000) for _ in range(100)]

    assert busy[0].plan.prefill is not None
    assert busy[0].reservation.prefill == Life("p0", "e1")
    # Its queue grows with each, until waiting there is no better.
    remote = [decision.plan.prefill is not None for decision in busy]
    assert remote.index(False) > 20


def test_prefill_can_be_kept_local() -> None:
    rig = Rig(worker("d0"), worker("p0", Role.PREFILL), prefill=Prefill.LOCAL)
    rig.tell("d0", 2, Load(running=10, used_blocks=100, total_blocks=1000))

    assert rig.plan(1000).plan.prefill is None


def test_prefill_workers_are_not_charged_for_decoding() -> None:
    rig = Rig(worker("d0"), worker("p0", Role.PREFILL))
    decision = rig.plan(1000)

    (candidate,) = decision.prefill_candidates
    assert candidate.work.completion == 0
    assert decision.chosen == candidate.work


def test_a32_kv_does_not_pile_requests_with_one_prefix_up_on_one_worker() -> None:
    rig = Rig(*(worker(f"d{n}") for n in range(4)), by="kv")
    hashes = tuple(range(50))
    rig.tell("d2", 2, BlocksStored(hashes))

    share = Counter(
        rig.plan(830, block_hashes=hashes, block_size=16).plan.decode.id for _ in range(200)
    )

    assert share.most_common(1)[0][0] == "d2"
    assert max(share.values()) <= 2 * 200 / 4


def test_hashes_of_another_block_size_count_for_nothing() -> None:
    rig = Rig(worker("d0"))
    rig.tell("d0", 2, BlocksStored((0, 1)))

    assert rig.plan(100, block_hashes=(0, 1), block_size=32).plan.expected_cached_tokens == 0


def test_a_worker_of_another_block_size_has_none_of_the_hits_of_others() -> None:
    rig = Rig(worker("d0"), worker("d1", block_size=32), by="kv")
    rig.tell("d0", 2, BlocksStored((0, 1)))
    rig.tell("d1", 2, BlocksStored((7, 8)))

    decision = rig.plan(100, block_hashes=(0, 1), block_size=16)

    assert [c.cached_tokens for c in decision.decode_candidates] == [32, 0]


def test_a_wholly_cached_prompt_still_leaves_its_last_token() -> None:
    rig = Rig(worker("d0"))
    rig.tell("d0", 2, BlocksStored((0, 1)))

    plan = rig.plan(32, block_hashes=(0, 1), block_size=16).plan

    assert plan.expected_cached_tokens == 16


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv, least_loaded, power_of_two"):
        find_policy("fastest")


def test_a_plug_in_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("turns", "services.router.policies:RoundRobin", "kvmesh.policies")
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: EntryPoints([point]).select(group=group)
    )

    assert find_policy("turns") is policies.RoundRobin
