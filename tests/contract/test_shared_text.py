"""One suite for every place of shared texts: file, Consul with a real agent, and the fake."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import Discovery, SharedText
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.factory import create
from kvmesh.testing.consul import ConsulAgent
from kvmesh.testing.discovery import MemoryDiscovery

Place = Callable[[], AbstractAsyncContextManager[Discovery]]
"""Opens one process's view of the place."""

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def text_agent() -> Iterator[ConsulAgent]:
    with asyncio.Runner() as runner:
        agent = ConsulAgent()
        runner.run(agent.__aenter__())
        yield agent
        runner.run(agent.__aexit__(None, None, None))


@pytest.fixture(params=["memory", "local", "consul"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "memory":
        return one_memory()
    if request.param == "local":
        config = DiscoveryConfig(directory=str(tmp_path / "members"))
    else:
        agent = request.getfixturevalue("text_agent")
        config = DiscoveryConfig(
            kind=DiscoveryKind.CONSUL,
            consul_address=agent.address,
            consul_prefix=f"texts{next(_prefixes)}",
        )
    return lambda: create(config, SystemClock(), random.Random(1))


def one_memory() -> Place:
    discovery = MemoryDiscovery()

    @asynccontextmanager
    async def view() -> AsyncIterator[Discovery]:
        yield discovery

    return view


@pytest.fixture
async def text(place: Place) -> AsyncIterator[SharedText]:
    async with place() as discovery:
        yield discovery.shared("routing")


class Watch:
    """What a watcher sees, for as long as a test waits for it."""

    def __init__(self, texts: AsyncIterator[str | None]) -> None:
        self._texts = texts
        self.history: list[str | None] = []

    async def next(self) -> str | None:
        async with asyncio.timeout(30):
            self.history.append(await anext(self._texts))
        return self.history[-1]

    async def until(self, wanted: str | None) -> None:
        while await self.next() != wanted:
            pass


@asynccontextmanager
async def watching(text: SharedText) -> AsyncIterator[Watch]:
    texts = text.watch()
    try:
        yield Watch(texts)
    finally:
        await texts.aclose()  # type: ignore[attr-defined]


async def put(text: SharedText, content: str | None) -> None:
    assert await text.write(content, (await text.read()).version)


async def test_what_is_not_there_is_seen_at_once(text: SharedText) -> None:
    assert (await text.read()).text is None
    async with watching(text) as watch:
        assert await watch.next() is None


async def test_what_is_there_is_seen_at_once(text: SharedText) -> None:
    await put(text, "one")
    async with watching(text) as watch:
        assert await watch.next() == "one"


@pytest.mark.parametrize("content", ["", "a = 1\n", 'ключ = "значение"\r\n\x00', "x" * 20_000])
async def test_content_comes_as_it_was_written(text: SharedText, content: str) -> None:
    await put(text, content)
    assert (await text.read()).text == content


async def test_changes_are_seen_by_others_and_removal_too(place: Place) -> None:
    async with place() as mine, place() as other, watching(other.shared("routing")) as watch:
        text = mine.shared("routing")
        assert await watch.next() is None
        for content in ("one", "two", "", "three"):
            await put(text, content)
            assert await watch.next() == content
        await put(text, None)
        assert await watch.next() is None
        await put(text, "four")
        assert await watch.next() == "four"


async def test_of_quick_changes_the_last_is_seen_and_no_two_equal_in_a_row(
    text: SharedText,
) -> None:
    async with watching(text) as watch:
        for number in range(20):
            await put(text, str(number // 2))
        await watch.until("9")
        await put(text, "end")
        await watch.until("end")
    assert all(one != other for one, other in itertools.pairwise(watch.history))


async def test_a_write_on_an_old_version_does_nothing(text: SharedText) -> None:
    absent = (await text.read()).version
    assert await text.write("one", absent)
    assert not await text.write("two", absent)
    assert not await text.write(None, absent)
    first = (await text.read()).version
    assert await text.write("two", first)
    assert not await text.write("three", first)
    assert not await text.write(None, first)
    assert (await text.read()).text == "two"
    assert await text.write(None, (await text.read()).version)
    assert (await text.read()).text is None


async def test_removing_what_is_not_there_succeeds(text: SharedText) -> None:
    assert await text.write(None, (await text.read()).version)
    assert (await text.read()).text is None


async def test_of_many_writers_at_once_one_wins(place: Place) -> None:
    async with place() as mine, place() as other:
        texts = [mine.shared("routing"), other.shared("routing")]
        version = (await texts[0].read()).version
        written = await asyncio.gather(*(texts[n % 2].write(str(n), version) for n in range(8)))
        assert written.count(True) == 1
        assert (await texts[1].read()).text == str(written.index(True))


async def test_texts_of_different_names_are_different(place: Place) -> None:
    async with place() as discovery:
        await put(discovery.shared("routing"), "one")
        assert (await discovery.shared("other").read()).text is None


async def test_a_text_is_no_member(place: Place) -> None:
    async with place() as discovery:
        await put(discovery.shared("routing"), "one")
        members = discovery.watch()
        assert await anext(members) == ()
        await members.aclose()  # type: ignore[attr-defined]


async def test_it_says_where_it_is(text: SharedText) -> None:
    assert text.where
