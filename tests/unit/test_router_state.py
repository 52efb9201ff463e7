"""What the router knows of workers, and what it has reserved on them."""

from collections.abc import Sequence

import pytest

from kvmesh.types import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheSnapshot,
    Load,
    Member,
    Role,
    State,
    WorkerEvent,
    WorkerNews,
)
from services.router.reservations import Ledger, Life, Reservation
from services.router.state import Applied, Fleet
from services.router.worker import WorkerState

D0 = Life("d0", "e1")


def member(name: str = "d0", epoch: str = "e1", **fields: object) -> Member:
    defaults: dict[str, object] = {
        "role": Role.DECODE,
        "address": f"{name}:1",
        "state": State.READY,
        "model": "m",
        "block_size": 16,
    }
    return Member(id=name, epoch=epoch, **(defaults | fields))  # type: ignore[arg-type]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def fleet(ledger: Ledger) -> Fleet:
    fleet = Fleet(ledger)
    fleet.update([member()])
    return fleet


def tell(
    fleet: Fleet, life: Life, sequence: int, events: Sequence[WorkerEvent] = (), epoch: str = ""
) -> Applied:
    return fleet.apply(life, WorkerNews(life.worker_id, epoch or life.epoch, sequence, events))


def state(fleet: Fleet, life: Life = D0) -> WorkerState:
    worker = fleet.find(life)
    assert worker is not None
    return worker


def routable(fleet: Fleet) -> list[Life]:
    return [w.life for w in fleet.routable("m", Role.DECODE)]


def test_a_worker_is_routable_from_its_first_snapshot(fleet: Fleet) -> None:
    assert routable(fleet) == []
    assert tell(fleet, D0, 1, [BlocksStored((1, 2))]) is Applied.OK
    assert routable(fleet) == [D0]
    assert state(fleet).cached == {1, 2}


@pytest.mark.parametrize("listed", [State.STARTING, State.DRAINING])
def test_only_ready_workers_are_routable(fleet: Fleet, listed: State) -> None:
    tell(fleet, D0, 1)
    fleet.update([member(state=listed)])

    assert routable(fleet) == []
    assert fleet.watchable() == {}


def test_deltas_follow_in_order(fleet: Fleet) -> None:
    tell(fleet, D0, 1, [BlocksStored((1, 2))])
    tell(fleet, D0, 2, [BlocksRemoved((1,)), BlocksStored((3,)), Load(running=2)])

    assert state(fleet).cached == {2, 3}
    assert state(fleet).load.running == 2
    tell(fleet, D0, 3, [BlocksCleared(), BlocksStored((9,))])
    assert state(fleet).cached == {9}


@pytest.mark.parametrize("sequence", [2, 4])
def test_a_gap_or_a_repeat_is_not_taken_over(fleet: Fleet, sequence: int) -> None:
    tell(fleet, D0, 1, [BlocksStored((1,))])
    tell(fleet, D0, 2, [BlocksStored((2,))])

    assert tell(fleet, D0, sequence, [BlocksStored((3,))]) is Applied.GAP
    assert state(fleet).cached == {1, 2}
    assert tell(fleet, D0, 1, [CacheSnapshot((5,))]) is Applied.OK
    assert state(fleet).cached == {5}


def test_a_delta_before_any_snapshot_is_a_gap(fleet: Fleet) -> None:
    assert tell(fleet, D0, 2) is Applied.GAP
    assert routable(fleet) == []


def test_a_suspect_is_routable_again_after_a_snapshot(fleet: Fleet) -> None:
    tell(fleet, D0, 1, [BlocksStored((1,))])
    fleet.suspect(D0)

    assert routable(fleet) == []
    assert state(fleet).cached == set()
    assert tell(fleet, D0, 2) is Applied.GAP
    tell(fleet, D0, 1)
    assert routable(fleet) == [D0]


def test_a_new_epoch_forgets_the_old_life(fleet: Fleet, ledger: Ledger) -> None:
    tell(fleet, D0, 1, [BlocksStored((1,)), Load(running=3)])
    old = ledger.reserve(D0, 5, None, 3)
    reborn = Life("d0", "e2")

    fleet.update([member(epoch="e2")])

    assert ledger.lives() == ()
    assert tell(fleet, D0, 2, [BlocksStored((7,))]) is Applied.STALE
    fleet.suspect(D0)
    assert tell(fleet, reborn, 1) is Applied.OK
    assert routable(fleet) == [reborn]
    assert state(fleet, reborn).cached == set()
    assert state(fleet, reborn).load == Load()
    new = ledger.reserve(reborn, 4, None, 2)
    ledger.release(old)
    assert ledger.held(reborn).requests == 1
    assert ledger.held(reborn).blocks == 6
    ledger.release(new)
    assert ledger.lives() == ()
    assert ledger.active == 0


def test_another_life_that_answers_is_not_believed(fleet: Fleet) -> None:
    assert tell(fleet, D0, 1, epoch="e2") is Applied.STALE
    assert routable(fleet) == []


def test_a_registry_without_epochs_takes_the_worker_at_its_word(
    fleet: Fleet, ledger: Ledger
) -> None:
    fleet.update([member(epoch="")])
    life = Life("d0", "")
    tell(fleet, life, 1, [BlocksStored((1,))], epoch="e1")
    assert state(fleet, life).reference().epoch == "e1"
    old = ledger.reserve(life, 5, None, 3)
    tell(fleet, life, 1, epoch="e1")
    assert ledger.held(life).requests == 1

    tell(fleet, life, 1, epoch="e2")

    assert state(fleet, life).reference().epoch == "e2"
    assert ledger.held(life).is_zero()
    ledger.release(old)
    assert ledger.lives() == ()


def test_a_worker_that_comes_back_in_the_same_life_keeps_its_reservations(
    fleet: Fleet, ledger: Ledger
) -> None:
    tell(fleet, D0, 1, [BlocksStored((1,))])
    held = ledger.reserve(D0, 5, None, 3)

    fleet.update([])
    fleet.update([member()])

    assert ledger.held(D0).requests == 1
    assert routable(fleet) == []
    ledger.release(held)
    assert ledger.held(D0).is_zero()


def test_a_registry_refresh_changes_no_figure(fleet: Fleet, ledger: Ledger) -> None:
    tell(fleet, D0, 1, [BlocksStored((1,)), Load(running=3, used_blocks=9)])
    ledger.reserve(D0, 5, None, 3)
    before = (state(fleet).others, state(fleet).other_blocks, ledger.held(D0).blocks)

    fleet.update([member()])

    assert (state(fleet).others, state(fleet).other_blocks, ledger.held(D0).blocks) == before
    assert routable(fleet) == [D0]


def test_models_are_known_from_any_role_and_for_ever(fleet: Fleet) -> None:
    fleet.update([member("t0", role=Role.TOKENIZER, model="other")])
    fleet.update([])

    assert fleet.knows_model("m")
    assert fleet.knows_model("other")
    assert not fleet.knows_model("never")
    assert fleet.workers() == ()


def test_own_requests_are_not_counted_twice(fleet: Fleet, ledger: Ledger) -> None:
    ledger.reserve(D0, 5, None, 3)
    ledger.reserve(D0, 5, None, 3)
    tell(fleet, D0, 1, [Load(running=2, waiting=1, used_blocks=20)])

    assert state(fleet).others == 1
    assert state(fleet).other_blocks == 10


def test_a_decode_that_has_not_arrived_hides_no_request_of_others(
    fleet: Fleet, ledger: Ledger
) -> None:
    reservation = ledger.reserve(D0, 5, Life("p0", "e1"), 3)
    tell(fleet, D0, 1, [Load(running=1)])
    assert state(fleet).others == 1

    ledger.prefilled(reservation)
    tell(fleet, D0, 2, [Load(running=2)])
    assert state(fleet).others == 1


def test_tickets_are_not_work(fleet: Fleet) -> None:
    tell(fleet, D0, 1, [Load(running=1, used_blocks=50, ticket_blocks=40)])

    assert state(fleet).other_blocks == 10


def test_remembered_hashes_are_bounded(ledger: Ledger) -> None:
    fleet = Fleet(ledger, max_cached_blocks=5)
    fleet.update([member(), member("d1", total_blocks=2)])
    tell(fleet, D0, 1, [BlocksStored(tuple(range(4))), BlocksStored(tuple(range(10, 14)))])
    tell(fleet, Life("d1", "e1"), 1, [BlocksStored(tuple(range(9)))])

    assert state(fleet).cached == {0, 1, 2, 3, 10}
    assert state(fleet, Life("d1", "e1")).cached == {0, 1, 2, 3}


def test_a_reservation_moves_from_prefill_to_decode_and_ends() -> None:
    ledger, prefill = Ledger(), Life("p0", "e1")
    reservation = ledger.reserve(D0, 5, prefill, 3)
    assert (ledger.held(D0).requests, ledger.held(D0).present, ledger.held(D0).blocks) == (1, 0, 5)
    assert (ledger.held(prefill).requests, ledger.held(prefill).blocks) == (1, 3)

    ledger.prefilled(reservation)
    ledger.prefilled(reservation)
    assert ledger.held(prefill).is_zero()
    assert ledger.held(D0).present == 1

    ledger.release(reservation)
    ledger.release(reservation)
    ledger.prefilled(reservation)
    assert ledger.lives() == ()
    assert ledger.active == 0


def overlap(fleet: Fleet, *hashes: int) -> int:
    index = fleet.index("m", 16)
    assert index is not None
    return index.overlaps(hashes).get(state(fleet).seat, 0)


def place(fleet: Fleet, ledger: Ledger, *hashes: int) -> Reservation:
    reservation = ledger.reserve(D0, 5, None, 3)
    expected = fleet.expect(state(fleet), hashes, 16)
    assert expected is not None
    reservation.expected = [expected]
    return reservation


def test_what_a_placed_prompt_will_cache_counts_from_its_plan(fleet: Fleet, ledger: Ledger) -> None:
    tell(fleet, D0, 1)
    first = place(fleet, ledger, 1, 2, 3)
    assert overlap(fleet, 1, 2, 3, 4) == 3

    ledger.prefilled(first)
    tell(fleet, D0, 2)
    assert overlap(fleet, 1, 2, 3, 4) == 3
    tell(fleet, D0, 3, [BlocksStored((1, 2))])
    assert overlap(fleet, 1, 2, 3, 4) == 2
    ledger.release(first)
    assert state(fleet).cached == {1, 2}


def test_what_a_cancelled_prompt_would_have_cached_does_not_count(
    fleet: Fleet, ledger: Ledger
) -> None:
    tell(fleet, D0, 1, [BlocksStored((1,))])
    ledger.release(place(fleet, ledger, 1, 2, 3))

    assert overlap(fleet, 1, 2, 3) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_expected_of_a_cache_that_was_lost(
    fleet: Fleet, ledger: Ledger, when: str
) -> None:
    tell(fleet, D0, 1)
    reservation = place(fleet, ledger, 1, 2, 3)
    if when == "after":
        ledger.prefilled(reservation)
    fleet.suspect(D0)
    tell(fleet, D0, 1)

    assert overlap(fleet, 1, 2, 3) == 0
    ledger.prefilled(reservation)
    ledger.release(reservation)
    assert overlap(fleet, 1, 2, 3) == 0
    assert [index.expected for index in fleet.indexes()] == [0]


def test_a_worker_without_events_is_known_by_what_was_placed_on_it(ledger: Ledger) -> None:
    fleet = Fleet(ledger)
    fleet.update([member(labels={"kv_events": "no"}, total_blocks=4)])
    tell(fleet, D0, 1, [CacheSnapshot(())])
    for hashes in ((1, 2, 3), (1, 2, 4)):
        reservation = place(fleet, ledger, *hashes)
        ledger.prefilled(reservation)
        ledger.release(reservation)
    for sequence in range(2, 9):
        tell(fleet, D0, sequence, [Load()])
    assert state(fleet).cached == {1, 2, 3, 4}

    ledger.prefilled(place(fleet, ledger, 1, 2, 5))
    assert state(fleet).cached == {1, 2, 4, 5}
    fleet.suspect(D0)
    assert state(fleet).cached == set()


def test_workers_of_another_model_or_block_size_have_another_index(ledger: Ledger) -> None:
    fleet = Fleet(ledger)
    fleet.update([member(), member("d1", block_size=32), member("d2", model="other")])
    for name in ("d0", "d1", "d2"):
        tell(fleet, Life(name, "e1"), 1, [BlocksStored((1,))])

    assert len({id(index) for index in fleet.indexes()}) == 3
    assert overlap(fleet, 1) == 1
    assert fleet.index("m", 8) is None
    fleet.update([member()])
    assert fleet.index("other", 16) is None
    assert fleet.index("m", 32) is None


def test_a_worker_that_leaves_frees_its_part_of_the_index(fleet: Fleet) -> None:
    fleet.update([member(), member("d1")])
    tell(fleet, D0, 1, [BlocksStored((1, 2))])
    tell(fleet, Life("d1", "e1"), 1, [BlocksStored((2, 3))])

    fleet.update([member()])
    assert overlap(fleet, 1, 2, 3) == 2
    tell(fleet, D0, 2)
    (index,) = fleet.indexes()
    assert len(index) == 2


def test_the_time_of_a_prompt_token_is_learned_for_each_worker(fleet: Fleet) -> None:
    fleet.update([member(), member("d1")])
    for _ in range(40):
        fleet.computed(D0, 1000, 0.5)
        fleet.computed(Life("d1", "e1"), 1000, 0.1)

    assert state(fleet).prefill_us == pytest.approx(500, rel=0.05)
    assert state(fleet, Life("d1", "e1")).prefill_us == pytest.approx(100, rel=0.05)
    assert 100 < fleet.speeds.typical(("m", Role.DECODE)) < 500


def test_short_prompts_teach_nothing_and_a_stall_not_much(fleet: Fleet) -> None:
    fleet.computed(D0, 20, 3.0)
    assert state(fleet).prefill_us == 0

    fleet.computed(D0, 1000, 0.1)
    fleet.computed(D0, 1000, 60.0)
    assert state(fleet).prefill_us < 300


def test_a_slow_time_is_forgotten_with_the_reports(fleet: Fleet) -> None:
    fleet.update([member(), member("d1")])
    for _ in range(100):
        fleet.computed(Life("d1", "e1"), 1000, 0.1)
    fleet.computed(D0, 1000, 0.8)
    slow = state(fleet).prefill_us

    for sequence in range(1, 2000):
        tell(fleet, D0, sequence)

    assert state(fleet).prefill_us < 1.1 * fleet.speeds.typical(("m", Role.DECODE)) < slow


def test_the_size_of_kv_is_read_from_tickets(fleet: Fleet) -> None:
    assert fleet.token_bytes("m") == 0
    tell(fleet, D0, 1, [Load(used_blocks=2, ticket_blocks=2, ticket_bytes=64_000)])
    tell(fleet, D0, 2, [Load()])

    assert fleet.token_bytes("m") == 2000


def test_the_pace_of_kv_is_learned_from_pulls(fleet: Fleet) -> None:
    mega = 1 << 20
    tell(fleet, D0, 1, [Load(received_bytes=4 * mega, received_seconds=0.004)])
    first = fleet.byte_seconds("m")
    assert first * mega == pytest.approx(0.001)
    tell(fleet, D0, 2, [Load(received_bytes=8 * mega, received_seconds=0.012)])
    assert fleet.byte_seconds("m") * mega == pytest.approx(0.00125)
    # Small pulls are mostly waiting, and a worker that tells no times tells nothing.
    tell(fleet, D0, 3, [Load(received_bytes=8 * mega + 1000, received_seconds=0.5)])
    tell(fleet, D0, 4, [Load(received_bytes=99 * mega, received_seconds=0.5)])
    assert fleet.byte_seconds("m") * mega == pytest.approx(0.00125)
