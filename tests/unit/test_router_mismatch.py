"""Workers whose caches are not what they claim attract no requests, until they are again."""

import random
from collections.abc import Sequence

import pytest

from kvmesh.kv.blocks import HASH_SCHEME
from kvmesh.types import BlocksStored, Member, Role, State, WorkerNews
from services.router.admission import Admission, QueueConfig
from services.router.audit import WINDOW
from services.router.dispatcher import Dispatcher
from services.router.planner import Decision, Mismatch, Planner, RoutingConfig
from services.router.plugins import Policies
from services.router.policy import Demand
from services.router.reservations import Ledger, Life
from services.router.state import Fleet

HASHES = tuple(range(100))
OTHER = tuple(range(1000, 1100))
LIAR, HONEST = Life("d0", "e1"), Life("d1", "e1")


class FakeClock:
    time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


def member(name: str, **fields: object) -> Member:
    given: dict[str, object] = {"block_size": 16, "model": "m", "state": State.READY}
    return Member(name, Role.DECODE, "e1", f"{name}:1", **(given | fields))  # type: ignore[arg-type]


class Rig:
    """Two workers behind a dispatcher; the first tells of blocks that it does not have."""

    def __init__(self, mismatch: Mismatch = Mismatch.IGNORE_CACHE) -> None:
        ledger = Ledger()
        self.fleet = Fleet(ledger)
        config = RoutingConfig(mismatch=mismatch)
        planner = Planner(self.fleet, ledger, config, Policies("kv"), random.Random(1))
        admission = Admission(self.fleet, planner, QueueConfig())
        self.dispatcher = Dispatcher(self.fleet, ledger, admission, FakeClock())
        self.dispatcher.update_members([member("d0"), member("d1")])
        self.told = {LIAR: 0, HONEST: 0}
        self.tell(LIAR, HASHES)
        self.tell(HONEST)

    def tell(self, life: Life, hashes: Sequence[int] = ()) -> None:
        self.told[life] += 1
        events = (BlocksStored(hashes),)
        self.dispatcher.apply(life, WorkerNews(life.worker_id, "e1", self.told[life], events))

    def ask(self, cached: int | None = None, hashes: Sequence[int] = HASHES) -> Decision:
        """Route a request to its end. `cached`: what is found cached of it."""
        decisions: list[Decision] = []

        def answer(decision: object) -> None:
            assert isinstance(decision, Decision)
            decisions.append(decision)

        demand = Demand("r", "m", 1601, 10, hashes, 16)
        routed = self.dispatcher.submit(demand, None, answer)
        if cached is not None:
            self.dispatcher.prefilled(routed, cached_tokens=cached)
            for life in self.told:
                self.tell(life)
                self.tell(life)
        self.dispatcher.end(routed)
        return decisions[0]


def test_a13_a_cache_that_is_not_there_does_not_attract_requests() -> None:
    rig = Rig()
    assert rig.ask().plan.decode.id == "d0"
    for _ in range(WINDOW):
        rig.ask(cached=0)

    decision = rig.ask()

    assert rig.dispatcher.audit.flagged(LIAR)
    assert decision.plan.expected_cached_tokens == 0
    workers = [rig.ask().plan.decode.id for _ in range(40)]
    assert set(workers) == {"d0", "d1"}
    rig.tell(HONEST, HASHES)
    assert rig.ask().plan.decode.id == "d1"
    assert rig.ask().plan.expected_cached_tokens == 1600


def test_a13_a_cache_that_is_right_again_counts_again() -> None:
    rig = Rig()
    for _ in range(WINDOW):
        rig.ask(cached=0)
    assert rig.dispatcher.audit.flagged(LIAR)
    rig.dispatcher.update_members([member("d0")])

    for _ in range(WINDOW - 1):
        assert rig.ask(cached=1600).plan.expected_cached_tokens == 0 or not rig.fleet.doubted

    assert not rig.dispatcher.audit.flagged(LIAR)
    assert rig.ask().plan.expected_cached_tokens == 1600


def test_it_may_be_flagged_only() -> None:
    rig = Rig(Mismatch.FLAG)
    for _ in range(WINDOW):
        rig.ask(cached=0)

    assert rig.dispatcher.audit.flagged(LIAR)
    assert rig.ask().plan.decode.id == "d0"
    assert rig.ask().plan.expected_cached_tokens == 1600


def test_a_doubted_worker_that_leaves_is_forgotten() -> None:
    rig = Rig()
    for _ in range(WINDOW):
        rig.ask(cached=0)
    assert [worker.id for worker in rig.fleet.doubted] == ["d0"]

    rig.dispatcher.update_members([member("d1")])

    assert not rig.fleet.doubted


def test_a13_hashes_of_another_kind_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.dispatcher.update_members([member("d2", labels={"block_hash": "sha256-v9"})])
    life = Life("d2", "e1")
    rig.dispatcher.apply(life, WorkerNews("d2", "e1", 1, (BlocksStored(HASHES),)))

    assert rig.ask().plan.decode.id == "d2"
    assert rig.ask().plan.expected_cached_tokens == 0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "d2: names its KV blocks by sha256-v9, prompts are hashed by" in record.message
    assert HASH_SCHEME in record.message


@pytest.mark.parametrize("labels", [{}, {"block_hash": HASH_SCHEME}])
def test_hashes_of_the_same_kind_count(
    labels: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.dispatcher.update_members([member("d2", labels=labels)])
    life = Life("d2", "e1")
    rig.dispatcher.apply(life, WorkerNews("d2", "e1", 1, (BlocksStored(HASHES),)))

    assert rig.ask().plan.expected_cached_tokens == 1600
    assert not caplog.records


def test_a13_another_block_size_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.dispatcher.update_members(
        [member("d0"), member("d2", block_size=32), member("x", block_size=8, model="other")]
    )
    life = Life("d2", "e1")
    rig.dispatcher.apply(life, WorkerNews("d2", "e1", 1, (BlocksStored(OTHER),)))

    assert rig.ask(hashes=OTHER).plan.expected_cached_tokens == 0
    (record,) = caplog.records
    assert "d2: its KV blocks have 32 tokens, those of other workers" in record.message
    assert "have 16" in record.message
