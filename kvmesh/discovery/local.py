"""Discovery on one machine: a directory with one locked file for each process.

A file's lock lives as long as the process that made it, whatever kills it, so a crash is
seen at the next look, 0.1 s later at most. Anyone who sees a dead one removes it.
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from kvmesh.clock import Clock
from kvmesh.discovery.base import Registration
from kvmesh.discovery.entry import Entry, from_text, newest, to_text
from kvmesh.discovery.filelock import LockedFile, owner_is_dead
from kvmesh.discovery.text_file import FileText
from kvmesh.errors import UnavailableError
from kvmesh.types import Member, State

LOOK_SECONDS = 0.1
"""A look costs one directory listing and three system calls for each member."""

REPAIR_SECONDS = 1.0

_NAME = re.compile(r"(?P<id>[^/]+)\.(?P<since>[0-9]+)\.[0-9]+\.json")

_log = logging.getLogger(__name__)


class LocalDiscovery:
    """Members in a directory. All users of it run on one machine, under one user id."""

    def __init__(
        self, directory: Path, clock: Clock, *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._look_seconds = look_seconds

    @asynccontextmanager
    async def register(self, member: Member) -> AsyncIterator[Registration]:
        """Publish the member. Raises UnavailableError if the directory can't be written."""
        registration = _LocalRegistration(self._directory, member, self._clock)
        await registration.set_state(member.state)
        keeper = asyncio.create_task(registration.keep(), name=f"discovery {member.id}")
        try:
            yield registration
        finally:
            keeper.cancel()
            try:
                await asyncio.wait((keeper,))
            finally:
                registration.withdraw()

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Look at the directory again and again; yield when something differs."""
        reader = _Reader(self._directory)
        shown: tuple[Member, ...] | None = None
        failing = False
        try:
            while True:
                try:
                    members = newest(reader.read())
                    failing = False
                except OSError as error:
                    if not failing:
                        _log.warning("discovery directory can't be read: %s", error)
                    failing, members = True, shown or ()
                if members != shown and not failing:
                    shown = members
                    yield members
                await asyncio.sleep(self._look_seconds)
        finally:
            reader.close()

    def shared(self, name: str) -> FileText:
        """Return the content of `<name>.toml` in the directory."""
        return FileText(self._directory / f"{name}.toml")


class _LocalRegistration:
    """One member's file."""

    def __init__(self, directory: Path, member: Member, clock: Clock) -> None:
        self._directory = directory
        self._entry = Entry(member, _since(directory, member.id, clock))
        self._published: Entry | None = None
        name = f"{_quoted(member.id)}.{self._entry.since}.{os.getpid()}.json"
        self._file = LockedFile(directory / name)

    async def set_state(self, state: State) -> None:
        """Publish a new state at once. Raises UnavailableError if the file can't be written."""
        self._entry = replace(self._entry, member=replace(self._entry.member, state=state))
        try:
            self._publish()
        except OSError as error:
            raise UnavailableError(f"discovery directory can't be written: {error}") from error

    async def keep(self) -> None:
        """Publish again what got lost or couldn't be written. Runs until cancelled."""
        failing = False
        while True:
            await asyncio.sleep(REPAIR_SECONDS)
            try:
                if self._published != self._entry or not self._file.is_published():
                    self._publish()
                failing = False
            except OSError as error:
                if not failing:
                    _log.warning("%s can't be published: %s", self._entry.member.id, error)
                failing = True

    def withdraw(self) -> None:
        """Remove the file."""
        try:
            self._file.withdraw()
        except OSError as error:
            # It is unlocked now, and so as good as gone.
            _log.warning("%s can't be removed: %s", self._entry.member.id, error)

    def _publish(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file.publish(json.dumps(to_text(self._entry)).encode())
        self._published = self._entry


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file as it was read. While it is open its inode number isn't given to another."""

    fd: int
    stat: os.stat_result
    entry: Entry | None


class _Reader:
    """The live entries of a directory; remembers open files between looks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: dict[str, _Seen] = {}

    def read(self) -> list[Entry]:
        """Return the entries whose owners live; remove the others. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {name for name in os.listdir(self._directory) if _NAME.fullmatch(name)}
        for name in self._seen.keys() - names:
            self._forget(name)
        return list(self._live(names))

    def close(self) -> None:
        """Close the open files."""
        for name in list(self._seen):
            self._forget(name)

    def _live(self, names: set[str]) -> Iterator[Entry]:
        for name in names:
            try:
                entry = self._look(name)
            except FileNotFoundError:
                self._forget(name)
                continue
            if entry is not None:
                yield entry

    def _look(self, name: str) -> Entry | None:
        path = self._directory / name
        seen = self._seen.get(name)
        if seen is None or not os.path.samestat(seen.stat, path.stat()):
            seen = self._open(name)
        if not owner_is_dead(seen.fd):
            return seen.entry
        if not os.path.samestat(seen.stat, path.stat()):
            # Its owner lives: between our two looks it has moved on to a new file.
            return self._open(name).entry
        if seen.entry is not None:
            path.unlink()
        self._forget(name)
        return None

    def _open(self, name: str) -> _Seen:
        self._forget(name)
        fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            seen = _Seen(fd, stat, _parsed(name, os.pread(fd, stat.st_size, 0)))
        except BaseException:
            os.close(fd)
            raise
        self._seen[name] = seen
        return seen

    def _forget(self, name: str) -> None:
        seen = self._seen.pop(name, None)
        if seen is not None:
            os.close(seen.fd)


def _parsed(name: str, content: bytes) -> Entry | None:
    try:
        return from_text(json.loads(content))
    except (ValueError, TypeError, AttributeError) as error:
        _log.warning("discovery entry %s is not ours and is left alone: %s", name, error)
        return None


def _since(directory: Path, member_id: str, clock: Clock) -> int:
    """Return the time in milliseconds, or more if a clock that went back left newer entries."""
    latest = 0
    with suppress(OSError):
        for name in os.listdir(directory):
            match = _NAME.fullmatch(name)
            if match and match["id"] == _quoted(member_id):
                latest = max(latest, int(match["since"]))
    return max(int(clock.wall() * 1000), latest + 1)


def _quoted(member_id: str) -> str:
    """Return the id as part of a file name; a leading dot would hide the file."""
    return quote(member_id, safe="").replace(".", "%2E")
