"""What a watched file may go through: editors, other things in its place, and no permission."""

# ruff: noqa: ASYNC240 - the tests write the files that are watched, a few bytes each

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.discovery.base import SharedText
from kvmesh.discovery.static import StaticDiscovery
from kvmesh.discovery.text_file import MAX_BYTES, FileText
from kvmesh.errors import UnavailableError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routing.toml"


@pytest.fixture
async def texts(path: Path) -> AsyncIterator[AsyncIterator[str | None]]:
    path.write_text("old")
    watch = FileText(path, look_seconds=0.01).watch()
    async with asyncio.timeout(30):
        assert await anext(watch) == "old"
        yield watch
        await watch.aclose()  # type: ignore[attr-defined]


async def test_a_file_that_comes_back_at_once_was_never_gone(path: Path) -> None:
    path.write_text("old")
    file = FileText(path, look_seconds=0)
    watch = file.watch()
    assert await anext(watch) == "old"
    missing = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    path.unlink()
    await asyncio.sleep(0)
    path.write_text("new")

    assert await missing == "new"
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_file_of_the_same_size_and_time_under_the_name_is_another(
    path: Path, texts: AsyncIterator[str | None]
) -> None:
    was = path.stat()
    other = path.with_name("other")
    other.write_text("new")
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    other.replace(path)

    assert await anext(texts) == "new"


async def test_a_link_is_followed_and_written_through(
    path: Path, texts: AsyncIterator[str | None]
) -> None:
    target = path.with_name("target")
    target.write_text("linked")
    path.unlink()
    path.symlink_to(target)
    assert await anext(texts) == "linked"

    file = FileText(path)
    assert await file.write("written", (await file.read()).version)

    assert path.is_symlink()
    assert await anext(texts) == "written"


async def test_what_is_no_file_is_not_read_and_the_last_text_stands(
    path: Path, texts: AsyncIterator[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    warned = asyncio.Event()

    def note(_: logging.LogRecord) -> bool:
        warned.set()
        return True

    caplog.handler.addFilter(note)
    caplog.set_level(logging.WARNING)
    pending = asyncio.ensure_future(anext(texts))
    path.unlink()
    os.mkfifo(path)
    await warned.wait()
    with pytest.raises(UnavailableError, match="not a regular file"):
        await FileText(path).read()
    path.unlink()
    path.write_text("new")

    assert await pending == "new"
    (record,) = caplog.records
    assert "not a regular file" in record.getMessage()


async def test_of_a_long_file_only_the_beginning_is_read(path: Path) -> None:
    path.write_text("x" * (2 * MAX_BYTES))

    assert len((await FileText(path).read()).text or "") == MAX_BYTES + 1


async def test_bytes_that_are_no_text_are_replaced(path: Path) -> None:
    path.write_bytes(b"a = \xff\n")

    assert (await FileText(path).read()).text == "a = \N{REPLACEMENT CHARACTER}\n"


async def test_while_somebody_else_writes_it_is_not_written(path: Path) -> None:
    file = FileText(path)
    with path.with_name(".routing.toml.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not await file.write("x", "")
    assert await file.write("x", "")


async def test_a_place_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = FileText(tmp_path / "file" / "routing.toml")

    with pytest.raises(UnavailableError, match="can't be written"):
        await file.write("x", "")


async def test_static_discovery_has_no_texts() -> None:
    text: SharedText = StaticDiscovery(()).shared("routing")
    watch = text.watch()

    assert await anext(watch) is None
    assert (await text.read()).text is None
    with pytest.raises(UnavailableError):
        await text.write("x", "")
    await watch.aclose()  # type: ignore[attr-defined]
