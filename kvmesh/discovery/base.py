"""Who is there: the contract of service discovery.

A process registers itself as a `Member` and keeps the entry alive; others watch. Where
members are kept there is room for a few short texts as well, such as settings.
`tests/contract/test_discovery.py` and `test_shared_text.py` run on every implementation.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from kvmesh.types import Member, State


class Registration(Protocol):
    """One member's entry, for as long as its context is open."""

    async def set_state(self, state: State) -> None:
        """Publish a new state. Returns once it is stored, or raises `UnavailableError`
        after a bounded time; the entry's renewal goes on trying either way.
        """
        ...


class Registry(Protocol):
    """Where a process makes itself known."""

    def register(self, member: Member) -> AbstractAsyncContextManager[Registration]:
        """Enter: publish and keep alive, through every outage. Leave: withdraw.

        An entry with the same id is replaced: the newest epoch wins. When the process
        dies without leaving, the entry vanishes by itself within seconds.
        """
        ...


class Resolver(Protocol):
    """Where a process learns of the others."""

    def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the whole membership, sorted by id: at once, then on every change.

        Never two equal snapshots in a row. While the registry can't be reached nothing
        is yielded: the last known members stand. Runs until it is closed.
        """
        ...


ROUTING_SETTINGS = "routing"
"""The shared text in which routers look for settings that change while they run."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A shared text as it was read: None where there is none. `version` is opaque."""

    text: str | None
    version: str


class SharedText(Protocol):
    """A short text that all processes see alike."""

    @property
    def where(self) -> str:
        """Where it is kept, for people."""
        ...

    def watch(self) -> AsyncIterator[str | None]:
        """Yield it at once, then after every change; None: there is none.

        Never two equal ones in a row; of changes in quick succession the last one is seen.
        While it can't be read nothing is yielded: the last one stands. Runs until it is
        closed.
        """
        ...

    async def read(self) -> Stored:
        """Return it as it is now. Raises `UnavailableError` after a bounded time."""
        ...

    async def write(self, text: str | None, version: str) -> bool:
        """Store another one, or with None remove it, if it is of that version still.

        Returns False, and does nothing, if it is not. Raises `UnavailableError` after a
        bounded time, as where texts can only be read.
        """
        ...


class Shared(Protocol):
    """Where all processes find the same texts."""

    def shared(self, name: str) -> SharedText:
        """Return the text of that name: a word of lower-case letters."""
        ...


class Discovery(Registry, Resolver, Shared, Protocol):
    """All of it. Every implementation has all."""
