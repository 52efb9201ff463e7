"""Leases end once, by whichever way comes first."""

import pytest

from kvmesh.kv.ledger import Lease, Ledger


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(block_bytes=10)
    ledger.add(Lease("a", (1, 2), expires=5.0))
    ledger.add(Lease("b", (2, 3), expires=7.0))
    return ledger


def test_totals_count_shared_blocks_once(ledger: Ledger) -> None:
    assert (len(ledger), ledger.blocks, ledger.byte_count) == (2, 3, 30)
    ledger.release("a")
    assert (len(ledger), ledger.blocks, ledger.byte_count) == (1, 2, 20)
    ledger.release("b")
    assert (len(ledger), ledger.blocks, ledger.byte_count) == (0, 0, 0)


def test_is_released_once(ledger: Ledger) -> None:
    lease = ledger.release("a")
    assert lease is not None
    assert lease.blocks == (1, 2)
    assert ledger.release("a") is None
    assert [lease.ticket_id for lease in ledger.expire(9.0)] == ["b"]


def test_ends_at_its_expiry(ledger: Ledger) -> None:
    assert ledger.expire(4.9) == []
    assert [lease.ticket_id for lease in ledger.expire(5.0)] == ["a"]
    assert ledger.release("a") is None


def test_next_expiry(ledger: Ledger) -> None:
    assert ledger.next_expiry == 5.0
    ledger.expire(5.0)
    assert ledger.next_expiry == 7.0
    assert len(ledger.clear()) == 1
    assert ledger.next_expiry is None


def test_unknown_tickets(ledger: Ledger) -> None:
    assert ledger.release("c") is None


def test_a_ticket_is_held_once(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="held already"):
        ledger.add(Lease("a", (9,), expires=9.0))
