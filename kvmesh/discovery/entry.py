"""A member as registries store it: flat text, and when it was registered."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvmesh.types import Member, Role, State

LABEL_PREFIX = "label-"

_NUMBERS = frozenset({"block_size", "total_blocks", "context_length", "pid"})
_TEXTS = frozenset(item.name for item in fields(Member)) - _NUMBERS - {"role", "state", "labels"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One registration. Of two with one id the greater `since` (milliseconds) is newer."""

    member: Member
    since: int

    @property
    def age_key(self) -> tuple[int, str]:
        """Sort key, oldest first; the epoch decides between equals, the same for everybody."""
        return self.since, self.member.epoch


def newest(entries: Iterable[Entry]) -> tuple[Member, ...]:
    """Return one member for each id and for each address of a role, sorted by id.

    Two entries with the same address can't both be alive: the host has changed its name,
    or the address its owner.
    """
    by_age = sorted(entries, key=lambda entry: entry.age_key)
    by_id = {entry.member.id: entry for entry in by_age}
    winners = sorted(by_id.values(), key=lambda entry: entry.age_key)
    by_address = {(entry.member.role, entry.member.address): entry.member for entry in winners}
    return tuple(sorted(by_address.values(), key=lambda member: member.id))


def to_text(entry: Entry) -> dict[str, str]:
    """Flatten an entry. Empty fields and zeros are left out."""
    member = entry.member
    values = {name: getattr(member, name) for name in sorted(_TEXTS | _NUMBERS)}
    text = {name: str(value) for name, value in values.items() if value}
    text |= {LABEL_PREFIX + name: value for name, value in sorted(member.labels.items())}
    return text | {
        "role": member.role.value,
        "state": member.state.value,
        "since": str(entry.since),
    }


def from_text(text: Mapping[str, str]) -> Entry:
    """Undo `to_text`; unknown keys are passed over. Raises ValueError if it isn't an entry."""
    for name in ("id", "role", "address"):
        if not text.get(name):
            raise ValueError(f"{name} is missing")
    values: dict[str, Any] = {name: text[name] for name in _TEXTS & text.keys()}
    values |= {name: int(text[name]) for name in _NUMBERS & text.keys()}
    labels = {
        name.removeprefix(LABEL_PREFIX): value
        for name, value in text.items()
        if name.startswith(LABEL_PREFIX)
    }
    member = Member(
        id=values.pop("id"),
        role=Role(text["role"]),
        epoch=values.pop("epoch", ""),
        address=values.pop("address"),
        state=State(text.get("state", State.STARTING)),
        labels=labels,
        **values,
    )
    return Entry(member, int(text.get("since", "0")))


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 host stands in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"{address!r} is not host:port")
    if not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} has no valid port")
    return bare, int(port)
