"""Tickets of the vLLM engine: issued, checked, held and ended."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvmesh.engine.base import EngineRequest, Seat
from kvmesh.engine.vllm.ledger import TicketLedger
from kvmesh.engine.vllm.stats import Gauge
from kvmesh.engine.vllm.tickets import TicketOffice, fingerprint
from kvmesh.errors import TicketError
from kvmesh.types import KvTicket, Role, Sampling

REQUEST = EngineRequest("r-1", [5] * 40, Sampling())
KV = {"do_remote_prefill": True, "remote_block_ids": [[4, 5], [9]], "remote_request_id": "r-1-ab"}


class StillClock:
    """A clock that stands."""

    wall_time = 1000.0

    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return self.wall_time


def an_office(clock: StillClock | None = None, print_: str = "f") -> TicketOffice:
    return TicketOffice(
        Seat("worker", "epoch", Role.PREFILL, Path("m"), "m"),
        clock or StillClock(),
        fingerprint=print_,
        block_bytes=[100, 7],
        lease_seconds=30,
        claim_address="tcp://here:1",
    )


def a_ticket(office: TicketOffice | None = None) -> KvTicket:
    return (office or an_office()).issue(REQUEST, KV, [3])


def test_a_ticket_says_what_is_held_and_until_when() -> None:
    ticket = a_ticket()
    assert (ticket.block_count, ticket.byte_count) == (3, 207)
    assert ticket.prompt_tokens == 40
    assert ticket.first_token_ids == (3,)
    assert 1000 < ticket.lease_expire_time < 1030
    assert (ticket.worker_id, ticket.epoch) == ("worker", "epoch")
    assert a_ticket().ticket_id != ticket.ticket_id


def test_vllms_parameters_arrive_unchanged() -> None:
    admitted = an_office().admit(REQUEST, a_ticket())
    assert admitted.kv_transfer == KV
    assert admitted.claim_address == "tcp://here:1"


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "sim"},
        {"backend": "tcp"},
        {"layout_fingerprint": "g"},
        {"prompt_tokens": 41},
        {"lease_expire_time": 1000.0},
        {"engine_params": b"\xff"},
        {"engine_params": b"[]"},
        {"engine_params": b'{"claim": 1, "kv_transfer": {}}'},
        {"engine_params": b'{"claim": "tcp://here:1", "kv_transfer": []}'},
        {"engine_params": b'{"kv_transfer": {}}'},
    ],
    ids=str,
)
def test_what_can_not_be_honoured_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TicketError):
        an_office().admit(REQUEST, replace(a_ticket(), **change))  # type: ignore[arg-type]


def test_a_ticket_expires() -> None:
    clock = StillClock()
    office = an_office(clock)
    ticket = a_ticket(office)
    clock.wall_time = ticket.lease_expire_time - 0.001
    office.admit(REQUEST, ticket)
    clock.wall_time = ticket.lease_expire_time
    with pytest.raises(TicketError, match="expired"):
        office.admit(REQUEST, ticket)


def test_the_fingerprint_digests_all_ranks_and_the_block_size() -> None:
    rank = {"block_bytes": [10], "compat_hash": "a"}
    whole = fingerprint([rank], 32)
    assert fingerprint([dict(rank)], 32) == whole
    others = [
        fingerprint([rank], 16),
        fingerprint([rank, rank], 32),
        fingerprint([rank | {"compat_hash": "b"}], 32),
        fingerprint([rank | {"block_bytes": [11]}], 32),
    ]
    assert whole not in others


def test_held_tickets_are_counted_until_they_end() -> None:
    ledger, first, second = TicketLedger(), a_ticket(), a_ticket()
    ledger.hold(first, "r-1-ab")
    ledger.hold(second, "r-2-cd")
    assert (ledger.blocks, ledger.bytes) == (6, 414)
    assert ledger.request_of(first.ticket_id) == "r-1-ab"
    ledger.end("r-1-ab")
    ledger.end("r-1-ab")
    ledger.end("never")
    assert (ledger.blocks, ledger.bytes) == (3, 207)
    assert ledger.request_of(first.ticket_id) is None
    ledger.clear()
    assert (ledger.blocks, ledger.bytes) == (0, 0)


def test_a_ticket_is_claimed_once_and_in_its_own_life_only() -> None:
    ledger, ticket = TicketLedger(), a_ticket()
    assert not ledger.claim("epoch", ticket.ticket_id)
    ledger.hold(ticket, "r-1-ab")
    assert not ledger.claim("other", ticket.ticket_id)
    assert ledger.claim("epoch", ticket.ticket_id)
    assert not ledger.claim("epoch", ticket.ticket_id)
    assert ledger.request_of(ticket.ticket_id) == "r-1-ab"


async def test_the_end_of_a_ticket_can_be_awaited() -> None:
    ledger, ticket = TicketLedger(), a_ticket()
    await ledger.wait_ended(ticket.ticket_id)
    ledger.hold(ticket, "r-1-ab")
    waiting = asyncio.create_task(ledger.wait_ended(ticket.ticket_id))
    await asyncio.sleep(0)
    assert not waiting.done()
    ledger.end("r-1-ab")
    await waiting


def test_the_gauge_sums_bytes_and_tells_of_ended_leases() -> None:
    ended: list[str] = []
    gauge = Gauge(ended.append)

    def stats(connector: dict[str, list[object]] | None) -> SimpleNamespace:
        return SimpleNamespace(
            num_waiting_reqs=2,
            num_skipped_waiting_reqs=1,
            kv_cache_usage=0.5,
            kv_connector_stats=connector,
        )

    gauge.update(stats(None))
    gauge.update(stats({"bytes_transferred": [10, 20], "kvmesh_ended": ["r-1-ab"]}))
    gauge.update(stats({"bytes_transferred": [5], "num_kv_expired_reqs": [1]}))
    assert (gauge.waiting, gauge.kv_usage, gauge.received_bytes) == (3, 0.5, 35)
    assert gauge.expired_leases == 1
    assert ended == ["r-1-ab"]
