import asyncio
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.discovery.filelock import LockedFile, owner_is_dead
from kvmesh.discovery.local import LocalDiscovery
from kvmesh.errors import UnavailableError
from kvmesh.types import Member, Role, State

MEMBER = Member("decode-h-1", Role.DECODE, "e1", "h:1", State.READY)


class StuckClock:
    """A clock that was set, and stands."""

    def __init__(self, wall: float) -> None:
        self._wall = wall

    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return self._wall


def test_every_version_of_a_locked_file_is_locked_until_it_is_withdrawn(tmp_path: Path) -> None:
    path = tmp_path / "x"
    file = LockedFile(path)
    for content in (b"one", b"two"):
        file.publish(content)
        assert path.read_bytes() == content
        assert not unlocked(path)
        assert file.is_published()
    file.withdraw()
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_version_is_no_longer_locked(tmp_path: Path) -> None:
    path = tmp_path / "x"
    file = LockedFile(path)
    file.publish(b"one")
    old = os.open(path, os.O_RDONLY)
    file.publish(b"two")
    assert owner_is_dead(old)
    os.close(old)
    file.withdraw()


def test_many_readers_who_look_at_once_do_not_take_each_other_for_the_owner(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"left by the dead")
    fds = [os.open(path, os.O_RDONLY) for _ in range(2)]
    # A reader that is caught in the act.
    fcntl.flock(fds[0], fcntl.LOCK_SH)
    assert owner_is_dead(fds[1])
    for fd in fds:
        os.close(fd)


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "x"
    file = LockedFile(path)
    file.publish(b"mine")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"!")
        signal.pause()
    try:
        assert os.read(read, 1) == b"!"
        assert not unlocked(path)
        file.release()
        assert unlocked(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


async def test_a_dead_owners_file_is_removed_and_never_shown(tmp_path: Path) -> None:
    async with LocalDiscovery(tmp_path, SystemClock()).register(MEMBER):
        ((name, content),) = contents(tmp_path).items()
    (tmp_path / name).write_text(content)
    async with watching(tmp_path) as watch:
        assert await anext(watch) == ()
    assert contents(tmp_path) == {}


async def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    foreign = {"notes.txt": "hello", "a.json": "{}", "x.1.2.json": "[1]", "y.1.2.json": "{nope"}
    for name, content in foreign.items():
        (tmp_path / name).write_text(content)
    async with (
        LocalDiscovery(tmp_path, SystemClock()).register(MEMBER),
        watching(tmp_path) as watch,
    ):
        assert await anext(watch) == (MEMBER,)
    assert contents(tmp_path) == foreign


async def test_a_restart_is_newer_even_if_the_clock_was_set_back(tmp_path: Path) -> None:
    late, early = (LocalDiscovery(tmp_path, StuckClock(wall)) for wall in (2e9, 1e9))
    second = replace(MEMBER, epoch="e2")
    third = replace(MEMBER, epoch="e3")
    async with (
        late.register(MEMBER),
        early.register(second),
        early.register(third),
        watching(tmp_path) as watch,
    ):
        assert await anext(watch) == (third,)


async def test_an_entry_that_somebody_deleted_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "members"
    async with (
        LocalDiscovery(directory, SystemClock()).register(MEMBER),
        watching(directory) as watch,
    ):
        assert await anext(watch) == (MEMBER,)
        shutil.rmtree(directory)
        assert await anext(watch) == ()
        assert await anext(watch) == (MEMBER,)


async def test_a_state_that_could_not_be_written_is_an_error_and_is_written_later(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "members"
    async with LocalDiscovery(directory, SystemClock()).register(MEMBER) as registration:
        directory.rename(tmp_path / "moved")
        directory.write_text("in the way")
        with pytest.raises(UnavailableError, match="members"):
            await registration.set_state(State.DRAINING)
        directory.unlink()
        async with watching(directory) as watch:
            assert await anext(watch) == ()
            assert await anext(watch) == (replace(MEMBER, state=State.DRAINING),)


async def test_registering_where_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="file"):
        async with LocalDiscovery(tmp_path / "file", SystemClock()).register(MEMBER):
            pass


async def test_last_known_members_stand_while_the_directory_cannot_be_read(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "members"
    async with (
        LocalDiscovery(directory, SystemClock()).register(MEMBER) as registration,
        watching(directory) as watch,
    ):
        assert await anext(watch) == (MEMBER,)
        directory.rename(tmp_path / "moved")
        directory.write_text("in the way")
        upcoming = asyncio.ensure_future(anext(watch))
        done, _ = await asyncio.wait((upcoming,), timeout=0.1)
        assert not done
        directory.unlink()
        (tmp_path / "moved").rename(directory)
        await registration.set_state(State.DRAINING)
        assert await upcoming == (replace(MEMBER, state=State.DRAINING),)


async def test_ids_of_any_form_make_file_names(tmp_path: Path) -> None:
    members = [replace(MEMBER, id=name, address=f"h:{n + 1}") for n, name in enumerate(NAMES)]
    discovery = LocalDiscovery(tmp_path, SystemClock())
    async with (
        discovery.register(members[0]),
        discovery.register(members[1]),
        discovery.register(members[2]),
        watching(tmp_path) as watch,
    ):
        assert {member.id for member in await anext(watch)} == set(NAMES)


async def test_an_owner_who_publishes_all_the_time_is_never_taken_for_dead(tmp_path: Path) -> None:
    states = [State.READY, State.DRAINING] * 100

    async def publish() -> None:
        async with LocalDiscovery(tmp_path, SystemClock()).register(MEMBER) as registration:
            for state in states:
                await registration.set_state(state)
            await registration.set_state(State.STARTING)
            while not finished.is_set():  # noqa: ASYNC110 - set by the other thread
                await asyncio.sleep(0.01)

    finished = threading.Event()
    async with watching(tmp_path, look_seconds=0.0) as watch:
        assert await anext(watch) == ()
        publisher = asyncio.create_task(asyncio.to_thread(asyncio.run, publish()))
        try:
            async for seen in watch:
                assert [member.id for member in seen] == [MEMBER.id]
                if seen[0].state is State.STARTING:
                    break
        finally:
            finished.set()
            await publisher


NAMES = ("../up", ".hidden", "decode-10.0.0.1-7001.2.3.json")


@asynccontextmanager
async def watching(
    directory: Path, look_seconds: float = 0.005
) -> AsyncIterator[AsyncIterator[tuple[Member, ...]]]:
    watch = LocalDiscovery(directory, SystemClock(), look_seconds=look_seconds).watch()
    try:
        async with asyncio.timeout(30):
            yield watch
    finally:
        await watch.aclose()  # type: ignore[attr-defined]


def unlocked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return owner_is_dead(fd)
    finally:
        os.close(fd)


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}
