"""An entry as a Consul service, and back. Nothing here talks to anybody.

A member is the service `<prefix>-<role>` whose id is the member's; its fields stand in the
service's metadata. It has two TTL checks, named for the member's epoch so that a new life
never inherits the old one's: `alive` (renewed all the time; critical means dead) and
`ready` (passing exactly in the state `ready`, for those who don't read metadata), and if
wanted a gRPC health check by the agent.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from consul import Check

from kvmesh.discovery.config import DiscoveryConfig
from kvmesh.discovery.entry import Entry, from_text, split_address, to_text
from kvmesh.errors import InvalidRequestError
from kvmesh.types import Member, State

DEREGISTER_AFTER = "1m"
"""Consul's minimum. Nobody waits for it: what isn't alive isn't shown."""

_READY_TTL = "8760h"
_CHECK_PREFIX = "kvmesh:"
_MAINTENANCE = ("_service_maintenance:", "_node_maintenance")

# Consul's limits on metadata.
_META_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
_META_VALUE_CHARS = 512
_META_KEYS = 64


@dataclass(frozen=True, slots=True)
class Sighting:
    """A service instance. `key` is unique in a cluster; `alive` is what its checks say."""

    key: tuple[str, str]
    entry: Entry
    alive: bool


def alive_check(member: Member) -> str:
    """Return the id of the check that says that the process lives."""
    return f"{_CHECK_PREFIX}{member.id}:{member.epoch}:alive"


def ready_check(member: Member) -> str:
    """Return the id of the check that says that it takes work."""
    return f"{_CHECK_PREFIX}{member.id}:{member.epoch}:ready"


def to_service(entry: Entry, config: DiscoveryConfig) -> dict[str, Any]:
    """Return what registers an entry: arguments for py-consul.

    Raises InvalidRequestError for what Consul's metadata can't hold.
    """
    member = entry.member
    try:
        host, port = split_address(member.address)
    except ValueError as error:
        raise InvalidRequestError(str(error), field="address") from None
    meta = to_text(entry)
    _check_meta(meta)
    ready = "passing" if member.state is State.READY else "critical"
    alive = Check.ttl(f"{int(config.consul_ttl_seconds * 1000)}ms")
    alive["DeregisterCriticalServiceAfter"] = DEREGISTER_AFTER
    checks = [
        {"CheckID": alive_check(member), "Name": "alive", "Status": "passing", **alive},
        {"CheckID": ready_check(member), "Name": "ready", "Status": ready, **Check.ttl(_READY_TTL)},
    ]
    if config.consul_grpc_check:
        check_id = f"{_CHECK_PREFIX}{member.id}:{member.epoch}:grpc"
        grpc = Check.grpc(member.address, "1s", timeout="1s")
        checks.append({"CheckID": check_id, "Name": "grpc", "Status": "critical", **grpc})
    return {
        "name": f"{config.consul_prefix}-{member.role}",
        "service_id": member.id,
        "address": host,
        "port": port,
        "meta": meta,
        "check": checks[0],
        "extra_checks": checks[1:],
        "replace_existing_checks": True,
    }


def from_services(instances: Iterable[Mapping[str, Any]]) -> Iterator[Sighting]:
    """Read the answer of `/v1/health/service`; what isn't ours is passed over."""
    for instance in instances:
        try:
            entry = from_text(instance["Service"]["Meta"] or {})
            key = (str(instance["Node"]["Node"]), str(instance["Service"]["ID"]))
            checks = {str(check["CheckID"]): str(check["Status"]) for check in instance["Checks"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        yield _sighting(key, entry, checks)


def _sighting(key: tuple[str, str], entry: Entry, checks: Mapping[str, str]) -> Sighting:
    member = entry.member
    ours = f"{_CHECK_PREFIX}{member.id}:{member.epoch}:"
    # For a moment a service still has the checks of its former life.
    current = {
        name: status
        for name, status in checks.items()
        if name.startswith(ours) or not name.startswith(_CHECK_PREFIX)
    }
    alive = current.pop(alive_check(member), "") == "passing"
    alive = alive and current.pop("serfHealth", "passing") != "critical"
    current.pop(ready_check(member), None)
    bad = [name for name, status in current.items() if status == "critical"]
    state = member.state
    if any(name.startswith(_MAINTENANCE) for name in bad):
        state = State.DRAINING
    elif bad and state is State.READY:
        state = State.STARTING
    return Sighting(key, replace(entry, member=replace(member, state=state)), alive)


def _check_meta(meta: Mapping[str, str]) -> None:
    if len(meta) > _META_KEYS:
        raise InvalidRequestError(f"Consul holds at most {_META_KEYS} fields", field="labels")
    for name, value in meta.items():
        if not _META_KEY.fullmatch(name):
            raise InvalidRequestError(f"Consul can't hold a field {name!r}", field=name)
        if len(value.encode()) > _META_VALUE_CHARS:
            message = f"Consul holds at most {_META_VALUE_CHARS} bytes in a field"
            raise InvalidRequestError(message, field=name)
