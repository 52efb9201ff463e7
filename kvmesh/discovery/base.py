"""Who is there: the contract of service discovery.

A process registers itself as a `Member` and keeps the entry alive; others watch.
`tests/contract/test_discovery.py` runs on every implementation.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
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


class Discovery(Registry, Resolver, Protocol):
    """Both halves. Every implementation has both."""
