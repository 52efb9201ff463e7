import random

import pytest

from kvmesh.discovery.consul_index import Cursor, Pace, Roster, backoff
from kvmesh.discovery.consul_service import Sighting
from kvmesh.discovery.entry import Entry
from kvmesh.types import Member, Role

PACE = Pace(period=0.1, pause=1.0)


def test_index_goes_on_and_an_equal_one_changes_nothing() -> None:
    cursor = Cursor(PACE)
    assert cursor.advance("100")
    assert cursor.advance("100")
    assert cursor.index == 100


def test_a20_index_that_goes_back_starts_again_from_0() -> None:
    cursor = Cursor(PACE)
    cursor.advance("100")
    assert not cursor.advance("40")
    assert cursor.index == 0
    assert cursor.advance("41")
    assert cursor.index == 41


@pytest.mark.parametrize("header", ["", "0", "-3", "x", "1.5", "٣"])
def test_a20_unusable_index_counts_as_1_and_costs_a_pause(header: str) -> None:
    cursor = Cursor(PACE)
    cursor.advance("100")
    cursor.advance(header)
    assert cursor.index == 1
    assert cursor.pause(elapsed=60.0) == PACE.pause
    cursor.advance("100")
    assert cursor.pause(elapsed=60.0) == 0.0


def test_a20_64_bit_index_stays_an_integer() -> None:
    cursor = Cursor(PACE)
    cursor.advance("18446744073709551615")
    assert cursor.index == 2**64 - 1
    assert cursor.advance("18446744073709551615")


def test_a20_answers_that_come_at_once_are_rate_limited() -> None:
    cursor = Cursor(PACE)
    cursor.advance("1")
    assert cursor.pause(elapsed=0.0) == PACE.period
    assert cursor.pause(elapsed=0.04) == pytest.approx(0.06)
    assert cursor.pause(elapsed=30.0) == 0.0


def test_a18_backoff_grows_to_a_bound_and_is_jittered() -> None:
    rng = random.Random(1)
    delays = [[backoff(failures, rng) for _ in range(50)] for failures in (1, 2, 3, 5, 10, 10**6)]
    assert all(0.05 <= delay <= 0.1 for delay in delays[0])
    assert all(1.0 <= delay <= 2.0 for delay in delays[-1])
    assert all(len(set(row)) == 50 for row in delays)
    assert sorted(map(max, delays)) == pytest.approx(list(map(max, delays)), rel=0.1)


def test_entry_that_goes_missing_is_gone() -> None:
    roster = Roster(grace=10.0)
    roster.observe([sighting("a"), sighting("b")], now=0.0)
    roster.observe([sighting("a")], now=1.0)
    assert names(roster) == {"a"}
    assert not roster.is_holding


def test_entries_that_an_emptied_registry_lacks_are_kept_for_the_grace_time() -> None:
    roster = Roster(grace=10.0)
    roster.observe([sighting("a"), sighting("b")], now=0.0)
    roster.interrupt()
    roster.observe([], now=100.0)
    assert names(roster) == {"a", "b"}
    assert roster.is_holding
    roster.observe([sighting("a")], now=105.0)
    assert names(roster) == {"a", "b"}
    roster.observe([sighting("a")], now=110.0)
    assert names(roster) == {"a"}
    assert not roster.is_holding


def test_outages_in_a_row_do_not_keep_a_lost_entry_for_ever() -> None:
    roster = Roster(grace=10.0)
    roster.observe([sighting("a")], now=0.0)
    for now in (5.0, 9.0, 13.0, 14.9):
        roster.interrupt()
        roster.observe([], now=now)
        assert names(roster) == {"a"}
    roster.interrupt()
    roster.observe([], now=15.0)
    assert names(roster) == set()


def test_what_is_seen_dead_is_not_kept_even_after_an_outage() -> None:
    roster = Roster(grace=10.0)
    roster.observe([sighting("a")], now=0.0)
    roster.interrupt()
    roster.observe([sighting("a", alive=False)], now=1.0)
    assert names(roster) == set()


def test_a18_whom_a_frozen_registry_thinks_dead_is_kept_for_the_grace_time() -> None:
    roster = Roster(grace=10.0)
    roster.observe([sighting("a"), sighting("b")], now=0.0)
    roster.doubt(now=6.0)
    roster.observe([sighting("a", alive=False), sighting("b", alive=False)], now=6.0)
    assert names(roster) == {"a", "b"}
    assert roster.is_holding
    roster.observe([sighting("a"), sighting("b", alive=False)], now=7.0)
    assert names(roster) == {"a", "b"}
    roster.observe([sighting("a"), sighting("b", alive=False)], now=16.0)
    assert names(roster) == {"a"}
    roster.observe([sighting("a", alive=False)], now=17.0)
    assert names(roster) == set()


def test_grace_ends_for_entries_that_leave_later() -> None:
    roster = Roster(grace=10.0)
    roster.observe([sighting("a")], now=0.0)
    roster.interrupt()
    roster.observe([sighting("a")], now=1.0)
    roster.observe([], now=11.0)
    assert names(roster) == set()


def sighting(name: str, *, alive: bool = True) -> Sighting:
    member = Member(id=name, role=Role.DECODE, epoch="e", address=f"{name}:1")
    return Sighting(("node", name), Entry(member, 1), alive)


def names(roster: Roster) -> set[str]:
    return {entry.member.id for entry in roster.entries}
