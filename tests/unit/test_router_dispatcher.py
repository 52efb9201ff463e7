"""What the dispatcher learns from the progress of requests."""

import random

import pytest

from kvmesh.types import BlocksStored, Member, Role, State, WorkerNews
from services.router.admission import Admission, QueueConfig
from services.router.audit import WINDOW
from services.router.dispatcher import Dispatcher, Routed
from services.router.planner import Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policy import Demand
from services.router.reservations import Ledger, Life
from services.router.state import Fleet

HASHES = tuple(range(100))


class FakeClock:
    time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class Rig:
    """One worker behind a dispatcher, on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        ledger = Ledger()
        self.fleet = Fleet(ledger)
        planner = Planner(self.fleet, ledger, RoutingConfig(), Policies("kv"), random.Random(1))
        admission = Admission(self.fleet, planner, QueueConfig())
        self.dispatcher = Dispatcher(self.fleet, ledger, admission, self.clock)
        self.join("e1")

    def join(self, epoch: str) -> None:
        self.life = Life("d0", epoch)
        member = Member("d0", Role.DECODE, epoch, "d0:1", State.READY, "m", block_size=16)
        self.dispatcher.update_members([member])
        self.dispatcher.apply(self.life, WorkerNews("d0", epoch, 1, ()))

    def route(self) -> Routed:
        demand = Demand("r", "m", 1601, 10, HASHES, 16)
        return self.dispatcher.submit(demand, None, lambda _: None)

    def prefill_us(self) -> float:
        worker = self.fleet.find(self.life)
        assert worker is not None
        return worker.prefill_us


def test_the_time_from_the_plan_to_the_first_token_teaches_how_quick_a_worker_is() -> None:
    rig = Rig()
    first, second = rig.route(), rig.route()
    rig.clock.time += 0.1601 * 3
    rig.dispatcher.prefilled(first)

    assert rig.prefill_us() == pytest.approx(300)
    rig.clock.time += 50
    rig.dispatcher.prefilled(first, cached_tokens=0)
    rig.dispatcher.end(second)
    assert rig.prefill_us() == pytest.approx(300)


def test_cache_hits_of_a_former_life_are_forgotten_with_it() -> None:
    rig = Rig()
    rig.dispatcher.apply(rig.life, WorkerNews("d0", "e1", 2, (BlocksStored(HASHES),)))
    for _ in range(WINDOW):
        routed = rig.route()
        rig.dispatcher.prefilled(routed, cached_tokens=800)
        rig.dispatcher.end(routed)
    former = rig.life
    assert rig.dispatcher.audit.flagged(former)

    rig.join("e2")

    assert not rig.dispatcher.audit.flagged(former)


def test_without_hashes_nothing_is_said_of_a_cache() -> None:
    rig = Rig()
    routed = rig.dispatcher.submit(Demand("r", "m", 1601, 10), None, lambda _: None)
    rig.dispatcher.prefilled(routed, cached_tokens=800)

    assert rig.dispatcher.audit.prompt_tokens == 0
