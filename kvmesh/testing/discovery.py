"""Discovery in memory, for tests in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kvmesh.discovery.base import Registration
from kvmesh.discovery.entry import Entry, newest
from kvmesh.types import Member, State


class MemoryDiscovery:
    """Keeps the contract of discovery without a registry. For one event loop."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._count = 0
        self._watchers: set[asyncio.Event] = set()

    @asynccontextmanager
    async def register(self, member: Member) -> AsyncIterator[Registration]:
        """Show the member until the context is left or `crash` is called."""
        self._count += 1
        key = self._count
        self._entries[key] = Entry(member, key)
        self._tell()
        try:
            yield _MemoryRegistration(self, key)
        finally:
            self._entries.pop(key, None)
            self._tell()

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the membership now and whenever it differs from what was yielded last."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        shown: tuple[Member, ...] | None = None
        try:
            while True:
                changed.clear()
                members = newest(self._entries.values())
                if members != shown:
                    shown = members
                    yield members
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)

    def crash(self, member_id: str) -> None:
        """Let every registration of this id vanish, as if its process had died."""
        dead = [key for key, entry in self._entries.items() if entry.member.id == member_id]
        for key in dead:
            del self._entries[key]
        self._tell()

    def change(self, key: int, state: State) -> None:
        """Set the state of a registration; nothing happens if it has crashed."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries[key] = replace(entry, member=replace(entry.member, state=state))
            self._tell()

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.set()


class _MemoryRegistration:
    def __init__(self, discovery: MemoryDiscovery, key: int) -> None:
        self._discovery = discovery
        self._key = key

    async def set_state(self, state: State) -> None:
        """Show the new state at once."""
        self._discovery.change(self._key, state)
