from typing import Any

import pytest

from kvmesh.discovery.config import DiscoveryConfig
from kvmesh.discovery.consul_service import (
    Sighting,
    alive_check,
    from_services,
    ready_check,
    to_service,
)
from kvmesh.discovery.entry import Entry, to_text
from kvmesh.errors import InvalidRequestError
from kvmesh.types import Member, Role, State

CONFIG = DiscoveryConfig()


def test_a23_first_status_is_critical_until_ready() -> None:
    statuses = {state: checks_of(to_service(an_entry(state), CONFIG)) for state in State}
    for state, checks in statuses.items():
        assert checks[alive_check(an_entry(state).member)] == "passing"
        wanted = "passing" if state is State.READY else "critical"
        assert checks[ready_check(an_entry(state).member)] == wanted


def test_starting_for_longer_than_a_minute_is_no_reason_to_be_reaped() -> None:
    service = to_service(an_entry(State.STARTING), CONFIG)
    reaping = [
        check["Name"]
        for check in [service["check"], *service["extra_checks"]]
        if "DeregisterCriticalServiceAfter" in check
    ]
    assert reaping == ["alive"]


def test_grpc_check_is_added_on_demand_and_starts_critical() -> None:
    config = DiscoveryConfig(consul_grpc_check=True)
    extra = to_service(an_entry(State.READY), config)["extra_checks"][-1]
    assert extra["grpc"] == "10.0.0.1:7001"
    assert extra["Status"] == "critical"


def test_checks_of_another_life_have_other_names() -> None:
    lives = [an_entry(State.READY, epoch).member for epoch in ("e1", "e2")]
    assert len({check(life) for life in lives for check in (alive_check, ready_check)}) == 4


def test_what_was_registered_is_sighted() -> None:
    for state in State:
        entry = an_entry(state)
        assert sight(entry) == Sighting(("n1", entry.member.id), entry, alive=True)


@pytest.mark.parametrize("status", ["critical", "warning"])
def test_a_member_without_heartbeat_is_not_alive(status: str) -> None:
    entry = an_entry(State.READY)
    assert not sight(entry, {alive_check(entry.member): status}).alive


def test_a_member_on_a_dead_node_is_not_alive() -> None:
    assert not sight(an_entry(State.READY), {"serfHealth": "critical"}).alive


def test_a_member_whose_grpc_port_fails_takes_no_work_but_is_there() -> None:
    seen = sight(an_entry(State.READY), {"kvmesh:decode-h-7001:e1:grpc": "critical"})
    assert seen.alive
    assert seen.entry.member.state is State.STARTING


@pytest.mark.parametrize("check", ["_service_maintenance:decode-h-7001", "_node_maintenance"])
def test_maintenance_mode_drains(check: str) -> None:
    seen = sight(an_entry(State.READY), {check: "critical"})
    assert seen.entry.member.state is State.DRAINING


def test_checks_left_from_a_former_life_do_not_count() -> None:
    former = {
        "kvmesh:decode-h-7001:e0:alive": "critical",
        "kvmesh:decode-h-7001:e0:grpc": "critical",
    }
    entry = an_entry(State.READY)
    assert sight(entry, former) == sight(entry)


def test_a_former_lifes_heartbeat_does_not_make_a_new_life_alive() -> None:
    entry = an_entry(State.READY, "e2")
    checks = {"kvmesh:decode-h-7001:e1:alive": "passing"}
    assert not next(from_services([instance(entry, checks)])).alive


@pytest.mark.parametrize(
    "foreign",
    [
        {},
        {"Service": None, "Node": {"Node": "n"}, "Checks": []},
        {"Service": {"ID": "x", "Meta": None}, "Node": {"Node": "n"}, "Checks": []},
        {"Service": {"ID": "x", "Meta": {"role": "web"}}, "Node": {"Node": "n"}, "Checks": []},
    ],
)
def test_foreign_services_are_passed_over(foreign: dict[str, Any]) -> None:
    entry = an_entry(State.READY)
    assert next(iter(from_services([foreign, instance(entry, {})]))).entry == entry


@pytest.mark.parametrize(
    ("labels", "field"),
    [
        ({"a b": "1"}, "label-a b"),
        ({"long": "x" * 513}, "label-long"),
        ({str(number): "1" for number in range(64)}, "labels"),
    ],
)
def test_what_consul_cannot_hold_is_an_error_with_its_name(
    labels: dict[str, str], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        to_service(an_entry(State.READY, labels=labels), CONFIG)
    assert caught.value.field == field


def test_ipv6_addresses_lose_their_brackets_in_consul() -> None:
    entry = Entry(Member("decode-6", Role.DECODE, "e", "[fe80::1]:7001"), 1)
    service = to_service(entry, CONFIG)
    assert (service["address"], service["port"]) == ("fe80::1", 7001)


def an_entry(state: State, epoch: str = "e1", labels: dict[str, str] | None = None) -> Entry:
    member = Member(
        id="decode-h-7001",
        role=Role.DECODE,
        epoch=epoch,
        address="10.0.0.1:7001",
        state=state,
        labels=labels or {},
    )
    return Entry(member, 5)


def checks_of(service: dict[str, Any]) -> dict[str, str]:
    checks = [service["check"], *service["extra_checks"]]
    return {check["CheckID"]: check["Status"] for check in checks}


def instance(entry: Entry, checks: dict[str, str]) -> dict[str, Any]:
    return {
        "Node": {"Node": "n1"},
        "Service": {"ID": entry.member.id, "Meta": to_text(entry)},
        "Checks": [{"CheckID": name, "Status": status} for name, status in checks.items()],
    }


def sight(entry: Entry, more_checks: dict[str, str] | None = None) -> Sighting:
    checks = {"serfHealth": "passing"} | checks_of(to_service(entry, CONFIG))
    return next(from_services([instance(entry, checks | (more_checks or {}))]))
