"""Discovery in memory, for tests in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from kvmesh.discovery.base import Registration, Stored
from kvmesh.discovery.entry import Entry, newest
from kvmesh.types import Member, State


class MemoryDiscovery:
    """Keeps the contract of discovery without a registry. For one event loop."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._count = 0
        self._watchers: set[asyncio.Event] = set()
        self._texts: dict[str, MemoryText] = {}

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

    def shared(self, name: str) -> "MemoryText":
        """Return the text of that name, the same for everybody."""
        return self._texts.setdefault(name, MemoryText())

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


class MemoryText:
    """A shared text in memory."""

    where = "memory"

    def __init__(self) -> None:
        self._stored = Stored(None, "0")
        self._watchers: set[asyncio.Event] = set()

    async def watch(self) -> AsyncIterator[str | None]:
        """Yield the text now and whenever it differs from what was yielded last."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        shown: Stored | None = None
        try:
            while True:
                changed.clear()
                stored = self._stored
                if shown is None or stored.text != shown.text:
                    shown = stored
                    yield stored.text
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)

    async def read(self) -> Stored:
        """Return the text."""
        return self._stored

    async def write(self, text: str | None, version: str) -> bool:
        """Take another one, if nobody else has written since."""
        if version != self._stored.version:
            return False
        self._stored = Stored(text, str(int(version) + 1))
        for changed in self._watchers:
            changed.set()
        return True


class _MemoryRegistration:
    def __init__(self, discovery: MemoryDiscovery, key: int) -> None:
        self._discovery = discovery
        self._key = key

    async def set_state(self, state: State) -> None:
        """Show the new state at once."""
        self._discovery.change(self._key, state)
