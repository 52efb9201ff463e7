"""Members that stand in the configuration and never change."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from kvmesh.discovery.base import Registration, Stored
from kvmesh.discovery.entry import from_text, split_address
from kvmesh.errors import UnavailableError
from kvmesh.types import Member, State


class StaticDiscovery:
    """Shows the configured members, always ready, in every process.

    Nobody watches over them: a dead one is still shown. Epochs aren't known in advance;
    an empty epoch means "unknown: accept any". Registering changes nothing.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        by_id = {member.id: member for member in members}
        self._members = tuple(by_id[name] for name in sorted(by_id))

    @asynccontextmanager
    async def register(self, member: Member) -> AsyncIterator[Registration]:
        """Do nothing; the configuration says who is there."""
        yield _NoRegistration()

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the configured members once, then wait until closed."""
        yield self._members
        await asyncio.Event().wait()

    def shared(self, name: str) -> "_NoText":
        """Return a text that is not there, ever."""
        return _NoText()


def parse_member(item: str) -> Member:
    """Read `role=host:port[;field=value...]`, e.g. `decode=10.0.0.7:7001;model=smol`.

    Fields are those of `Member`; `label-x` sets the label x. Raises ValueError.
    """
    first, *more = (part.strip() for part in item.split(";"))
    role, _, address = first.partition("=")
    host, port = split_address(address)
    text = {
        "id": f"{role}-{host}-{port}",
        "role": role,
        "address": address,
        "state": State.READY.value,
    }
    for part in more:
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not field=value")
        text[name] = value
    return from_text(text).member


class _NoText:
    where = "static discovery"

    async def watch(self) -> AsyncIterator[str | None]:
        yield None
        await asyncio.Event().wait()

    async def read(self) -> Stored:
        return Stored(None, "")

    async def write(self, text: str | None, version: str) -> bool:
        raise UnavailableError("static discovery has no place for shared texts")


class _NoRegistration:
    async def set_state(self, state: State) -> None:
        """Do nothing: static members are always ready."""
