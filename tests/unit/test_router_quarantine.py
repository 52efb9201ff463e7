"""Workers and pairs that keep failing are left alone for a while, and come back."""

import logging
import random

import pytest

from kvmesh.types import Leg, Member, Role, State, WorkerNews
from services.router.planner import Decision, Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policy import Demand
from services.router.quarantine import Quarantine, QuarantineConfig
from services.router.reservations import Ledger, Life, Reservation, Trial
from services.router.state import Fleet

P0, P1, D0, D1 = (Life(name, "e1") for name in ("p0", "p1", "d0", "d1"))


class FakeClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Rig:
    """A planner for two prefill and two decode workers that can be quarantined."""

    def __init__(self, clock: FakeClock, config: QuarantineConfig) -> None:
        self.clock = clock
        self.ledger = Ledger()
        self.quarantine = Quarantine(config, clock)
        self.fleet = Fleet(self.ledger, quarantine=self.quarantine)
        self.members = [member(life) for life in (P0, P1, D0, D1)]
        self.fleet.update(self.members)
        for life in (P0, P1, D0, D1):
            self.fleet.apply(life, WorkerNews(life.worker_id, life.epoch, 1, ()))
        routing = RoutingConfig(policy="random", quarantine=config)
        self.planner = Planner(
            self.fleet, self.ledger, routing, Policies("random"), random.Random(7)
        )

    def plan(self, prompt_tokens: int = 10, excluded: str = "") -> Reservation:
        """Plan a request; short ones are prefilled by decode."""
        decision = self.planner.plan(
            Demand("r", "m", prompt_tokens, excluded=frozenset(filter(None, [excluded])))
        )
        assert isinstance(decision, Decision)
        return decision.reservation

    def on(self, decode: Life, prefill: Life | None = None) -> Reservation:
        """Plan until it is on these workers; end all others."""
        for _ in range(64):
            reservation = self.plan(10 if prefill is None else 1000)
            if (reservation.decode, reservation.prefill) == (decode, prefill):
                return reservation
            self.ledger.release(reservation)
        raise AssertionError(f"nothing is planned on {decode}, {prefill}")

    def fail(self, leg: Leg, decode: Life, prefill: Life | None = None, times: int = 1) -> None:
        for _ in range(times):
            reservation = self.on(decode, prefill)
            trial(reservation).failed(leg, timed_out=False)
            self.ledger.release(reservation)

    def work(self, decode: Life, prefill: Life | None = None, times: int = 1) -> None:
        for _ in range(times):
            reservation = self.on(decode, prefill)
            trial(reservation).generating()
            self.ledger.release(reservation)

    def used(self, prompt_tokens: int = 10, times: int = 64) -> set[tuple[Life, Life | None]]:
        """Where requests go now, if they all run at once and tell nothing."""
        planned = [self.plan(prompt_tokens) for _ in range(times)]
        for reservation in planned:
            self.ledger.release(reservation)
        return {(each.decode, each.prefill) for each in planned}


def trial(reservation: Reservation) -> Trial:
    assert reservation.trial is not None
    return reservation.trial


def member(life: Life) -> Member:
    return Member(
        id=life.worker_id,
        role=Role.DECODE if life.worker_id.startswith("d") else Role.PREFILL,
        epoch=life.epoch,
        address=f"{life.worker_id}:1",
        state=State.READY,
        model="m",
        block_size=16,
        layout_fingerprint="layout",
    )


@pytest.fixture
def rig(clock: FakeClock) -> Rig:
    return Rig(clock, QuarantineConfig())


def test_a_worker_that_keeps_failing_is_left_alone(rig: Rig) -> None:
    rig.fail(Leg.DECODE, D0, times=3)
    assert rig.used() == {(D0, None), (D1, None)}

    rig.fail(Leg.DECODE, D0)

    assert rig.used() == {(D1, None)}
    assert rig.quarantine.held == ((D0,),)


def test_after_the_hold_one_request_at_a_time_tries_it(rig: Rig, clock: FakeClock) -> None:
    rig.fail(Leg.DECODE, D0, times=4)
    clock.time += 0.99
    assert rig.used() == {(D1, None)}
    clock.time += 0.02

    planned = [rig.plan() for _ in range(32)]

    probes = [each for each in planned if each.decode == D0]
    assert len(probes) == 1
    trial(probes[0]).generating()
    assert rig.quarantine.held == ()
    assert rig.used() == {(D0, None), (D1, None)}


def test_each_failed_try_doubles_the_hold_up_to_a_bound(clock: FakeClock) -> None:
    rig = Rig(clock, QuarantineConfig(hold_seconds=1, max_hold_seconds=5))
    rig.fail(Leg.DECODE, D0, times=4)

    holds = []
    for _ in range(5):
        began = clock.time
        while rig.used() == {(D1, None)}:
            clock.time += 0.25
        holds.append(clock.time - began)
        rig.fail(Leg.DECODE, D0)

    assert holds == [1, 2, 4, 5, 5]


def test_one_that_comes_back_and_fails_again_is_held_longer(rig: Rig, clock: FakeClock) -> None:
    rig.fail(Leg.DECODE, D0, times=4)
    clock.time += 1.01
    rig.work(D0)
    rig.fail(Leg.DECODE, D0, times=4)
    clock.time += 1.01
    assert rig.used() == {(D1, None)}
    clock.time += 1.0
    rig.work(D0)

    # Long after, it is a first time again.
    clock.time += 91
    rig.fail(Leg.DECODE, D0, times=4)
    clock.time += 1.01
    assert (D0, None) in rig.used()


def test_a50_a_request_that_told_nothing_lets_the_next_one_try(rig: Rig, clock: FakeClock) -> None:
    rig.fail(Leg.DECODE, D0, times=4)
    clock.time += 1.01
    first = rig.on(D0)
    assert rig.used() == {(D1, None)}

    rig.ledger.release(first)

    assert rig.on(D0).decode == D0


def test_requests_that_were_there_before_do_not_decide_a_try(rig: Rig, clock: FakeClock) -> None:
    early = [rig.on(D0) for _ in range(3)]
    rig.fail(Leg.DECODE, D0, times=4)
    clock.time += 1.01
    probe = rig.on(D0)

    trial(early[0]).failed(Leg.DECODE, timed_out=False)
    trial(early[1]).generating()

    assert rig.quarantine.held == ((D0,),)
    trial(probe).generating()
    assert rig.quarantine.held == ()


def test_a50_others_who_are_served_well_outweigh_one_who_fails(rig: Rig) -> None:
    for _ in range(20):
        rig.work(D0, times=2)
        rig.fail(Leg.DECODE, D0)

    assert rig.quarantine.held == ()


def test_failures_long_ago_do_not_count(rig: Rig, clock: FakeClock) -> None:
    for _ in range(10):
        rig.fail(Leg.DECODE, D0)
        clock.time += 11

    assert rig.quarantine.held == ()


def test_when_all_are_quarantined_those_that_failed_least_are_used(
    rig: Rig, clock: FakeClock
) -> None:
    rig.fail(Leg.DECODE, D0, times=4)
    clock.time += 1.01
    rig.fail(Leg.DECODE, D0)
    rig.fail(Leg.DECODE, D1, times=4)

    assert rig.used() == {(D1, None)}

    rig.work(D1)
    assert rig.quarantine.held == ((D0,),)


def test_only_one_worker_is_never_out(rig: Rig) -> None:
    rig.fleet.update(rig.members[:3])
    rig.fail(Leg.DECODE, D0, times=40)

    assert rig.used() == {(D0, None)}


def test_a_pair_that_cannot_hand_over_is_parted(rig: Rig, clock: FakeClock) -> None:
    rig.fail(Leg.HANDOFF, D0, P0, times=4)

    assert rig.quarantine.held == ((P0, D0),)
    assert rig.used(1000) == {(D0, P1), (D1, P0), (D1, P1)}

    clock.time += 1.01
    rig.work(D0, P0)
    assert rig.quarantine.held == ()
    assert rig.used(1000) == {(D0, P0), (D0, P1), (D1, P0), (D1, P1)}


def test_a_decode_worker_without_a_partner_computes_prompts_by_itself(rig: Rig) -> None:
    rig.fail(Leg.HANDOFF, D0, P0, times=4)
    rig.fail(Leg.HANDOFF, D0, P1, times=4)

    assert rig.used(1000) == {(D0, None), (D1, P0), (D1, P1)}
    decision = rig.planner.plan(Demand("r", "m", 1000, excluded=frozenset({"d1"})))
    assert isinstance(decision, Decision)
    assert decision.plan.reason == "quarantined"


def test_a_prefill_worker_that_fails_is_done_without(rig: Rig) -> None:
    rig.fail(Leg.PREFILL, D0, P0, times=2)
    rig.fail(Leg.PREFILL, D1, P0, times=2)

    assert rig.used(1000) == {(D0, P1), (D1, P1)}


def test_a_new_life_starts_afresh(rig: Rig) -> None:
    rig.fail(Leg.DECODE, D0, times=4)
    rig.fail(Leg.HANDOFF, D1, P0, times=4)

    new = Life("d0", "e2")
    rig.fleet.update([member(life) for life in (P1, new, D1)])

    assert rig.quarantine.held == ()


@pytest.mark.parametrize(("waited", "held"), [(9.9, ()), (10.1, ((D0,),))])
def test_a50_a_timeout_counts_if_there_was_time_enough(
    rig: Rig, clock: FakeClock, waited: float, held: object
) -> None:
    planned = [rig.on(D0) for _ in range(4)]
    clock.time += waited
    for reservation in planned:
        trial(reservation).failed(Leg.DECODE, timed_out=True)

    assert rig.quarantine.held == held


def test_it_can_be_switched_off(clock: FakeClock) -> None:
    rig = Rig(clock, QuarantineConfig(failures=0))
    rig.fail(Leg.DECODE, D0, times=40)

    assert rig.quarantine.held == ()


def test_a_request_fails_once(rig: Rig) -> None:
    reservation = rig.on(D0)
    for _ in range(10):
        trial(reservation).failed(Leg.DECODE, timed_out=False)

    assert rig.quarantine.held == ()


def test_it_is_told_in_the_log(
    rig: Rig, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig.fail(Leg.HANDOFF, D0, P0, times=4)
    clock.time += 1.01
    rig.work(D0, P0)

    assert [record.message for record in caplog.records] == [
        "p0 with d0: quarantined for 1 s, 4 of its last 4 requests failed",
        "p0 with d0: works again, out of quarantine",
    ]
