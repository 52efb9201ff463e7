"""One suite for every discovery: local, Consul with a real agent, and the fake."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import Discovery
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.factory import create
from kvmesh.testing.consul import ConsulAgent
from kvmesh.testing.discovery import MemoryDiscovery
from kvmesh.testing.member_process import MemberProcess
from kvmesh.types import Member, Role, State

Snapshot = tuple[Member, ...]

_prefixes = itertools.count()


@dataclass(frozen=True)
class Registry:
    """One registry: `open` gives a process's view of it, `doomed` a member to be crashed."""

    open: Callable[[], AbstractAsyncContextManager[Discovery]]
    doomed: Callable[[Member], AbstractAsyncContextManager[Callable[[], Awaitable[None]]]]


@pytest.fixture(scope="session")
def consul_agent() -> Iterator[ConsulAgent]:
    with asyncio.Runner() as runner:
        agent = ConsulAgent()
        runner.run(agent.__aenter__())
        yield agent
        runner.run(agent.__aexit__(None, None, None))


@pytest.fixture(params=["memory", "local", "consul"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    if request.param == "memory":
        return memory_registry()
    if request.param == "local":
        return real_registry(DiscoveryConfig(directory=str(tmp_path / "members")))
    agent = request.getfixturevalue("consul_agent")
    config = DiscoveryConfig(
        kind=DiscoveryKind.CONSUL,
        consul_address=agent.address,
        consul_prefix=f"contract{next(_prefixes)}",
        consul_ttl_seconds=2.0,
    )
    return real_registry(config)


def memory_registry() -> Registry:
    discovery = MemoryDiscovery()

    @asynccontextmanager
    async def view() -> AsyncIterator[Discovery]:
        yield discovery

    @asynccontextmanager
    async def doomed(member: Member) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        async def crash() -> None:
            discovery.crash(member.id)

        async with discovery.register(member):
            yield crash

    return Registry(view, doomed)


def real_registry(config: DiscoveryConfig) -> Registry:
    @asynccontextmanager
    async def doomed(member: Member) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        async with MemberProcess(config, member) as process:
            yield process.kill

    return Registry(lambda: create(config, SystemClock(), random.Random(1)), doomed)


class Watch:
    """Reads a watch in the background-free way: only when asked, and never for ever."""

    def __init__(self, snapshots: AsyncIterator[Snapshot]) -> None:
        self._snapshots = snapshots
        self.history: list[Snapshot] = []

    async def next(self) -> Snapshot:
        async with asyncio.timeout(30):
            self.history.append(await anext(self._snapshots))
        return self.history[-1]

    async def until(self, accept: Callable[[Snapshot], bool]) -> Snapshot:
        while not self.history or not accept(self.history[-1]):
            await self.next()
        return self.history[-1]


@asynccontextmanager
async def watching(discovery: Discovery) -> AsyncIterator[Watch]:
    snapshots = discovery.watch()
    try:
        yield Watch(snapshots)
    finally:
        await snapshots.aclose()  # type: ignore[attr-defined]


def a_member(number: int = 1, role: Role = Role.DECODE, epoch: str = "e1") -> Member:
    return Member(
        id=f"{role}-127.0.0.1-{7000 + number}",
        role=role,
        epoch=epoch,
        address=f"127.0.0.1:{7000 + number}",
        state=State.READY,
        model="SmolLM2 135M/Instruct",
        metrics_address="127.0.0.1:9000",
        http_address="127.0.0.1:8000",
        engine="sim",
        block_size=16,
        total_blocks=4096,
        context_length=8192,
        layout_fingerprint="f00d",
        pid=4242,
        labels={"zone": "a b=c", "rack": "7"},
    )


def ids(snapshot: Snapshot) -> list[str]:
    return [member.id for member in snapshot]


async def test_first_snapshot_comes_at_once_even_if_it_is_empty(registry: Registry) -> None:
    async with registry.open() as discovery, watching(discovery) as watch:
        assert await watch.next() == ()


async def test_member_arrives_with_every_field(registry: Registry) -> None:
    member = a_member()
    async with (
        registry.open() as mine,
        registry.open() as other,
        mine.register(member),
        watching(other) as watch,
    ):
        assert await watch.until(lambda seen: seen != ()) == (member,)


async def test_member_with_bare_fields_arrives_unchanged(registry: Registry) -> None:
    member = Member(id="router-h-1", role=Role.ROUTER, epoch="e", address="h:1")
    async with (
        registry.open() as discovery,
        discovery.register(member),
        watching(discovery) as watch,
    ):
        assert await watch.until(lambda seen: seen != ()) == (member,)


async def test_every_role_is_shown_sorted_by_id(registry: Registry) -> None:
    members = [a_member(number, role) for number, role in enumerate(Role)]
    async with registry.open() as discovery, AsyncExitStack() as stack:
        for member in reversed(members):
            await stack.enter_async_context(discovery.register(member))
        async with watching(discovery) as watch:
            seen = await watch.until(lambda seen: len(seen) == len(members))
            assert ids(seen) == sorted(member.id for member in members)


async def test_changes_are_yielded_and_leaving_removes(registry: Registry) -> None:
    first, second = a_member(1), a_member(2)
    async with registry.open() as discovery, watching(discovery) as watch:
        assert await watch.next() == ()
        async with discovery.register(first):
            assert await watch.next() == (first,)
            async with discovery.register(second):
                assert await watch.next() == (first, second)
            assert await watch.next() == (first,)
        assert await watch.next() == ()


async def test_set_state_is_seen(registry: Registry) -> None:
    member = replace(a_member(), state=State.STARTING)
    async with (
        registry.open() as discovery,
        watching(discovery) as watch,
        discovery.register(member) as registration,
    ):
        await watch.until(lambda seen: seen == (member,))
        await registration.set_state(State.READY)
        assert await watch.next() == (replace(member, state=State.READY),)
        await registration.set_state(State.DRAINING)
        assert await watch.next() == (replace(member, state=State.DRAINING),)


async def test_no_two_equal_snapshots_in_a_row(registry: Registry) -> None:
    member = a_member()
    async with registry.open() as discovery, watching(discovery) as watch:
        async with discovery.register(member) as registration:
            for state in (State.READY, State.READY, State.DRAINING, State.DRAINING):
                await registration.set_state(state)
            await watch.until(lambda seen: [each.state for each in seen] == [State.DRAINING])
        await watch.until(lambda seen: seen == () and len(watch.history) > 1)
    pairs = itertools.pairwise(watch.history)
    assert all(earlier != later for earlier, later in pairs)


async def test_newest_epoch_wins_and_the_older_one_leaving_changes_nothing(
    registry: Registry,
) -> None:
    old, new = a_member(epoch="old"), replace(a_member(epoch="new"), state=State.STARTING)
    async with registry.open() as first, registry.open() as second, watching(second) as watch:
        older, newer = first.register(old), second.register(new)
        await older.__aenter__()
        await watch.until(lambda seen: seen == (old,))
        registration = await newer.__aenter__()
        await watch.until(lambda seen: seen == (new,))
        await older.__aexit__(None, None, None)
        await registration.set_state(State.READY)
        assert await watch.next() == (replace(new, state=State.READY),)
        await newer.__aexit__(None, None, None)
        assert await watch.next() == ()


async def test_crash_removes(registry: Registry) -> None:
    survivor, victim = a_member(1), a_member(2)
    async with (
        registry.open() as discovery,
        discovery.register(survivor),
        watching(discovery) as watch,
        registry.doomed(victim) as crash,
    ):
        await watch.until(lambda seen: seen == (survivor, victim))
        await crash()
        assert await watch.next() == (survivor,)


async def test_restart_after_a_crash_shows_the_new_epoch_and_never_two(
    registry: Registry,
) -> None:
    async with registry.open() as discovery, watching(discovery) as watch:
        for life in range(3):
            member = a_member(epoch=f"life{life}")
            async with registry.doomed(member) as crash:
                await watch.until(lambda seen, member=member: seen == (member,))  # type: ignore[misc]
                await crash()
        assert max(map(len, watch.history)) == 1


async def test_many_members(registry: Registry) -> None:
    members = [a_member(number) for number in range(50)]
    async with registry.open() as discovery, watching(discovery) as watch:
        async with AsyncExitStack() as stack:
            for member in members:
                await stack.enter_async_context(discovery.register(member))
            assert len(await watch.until(lambda seen: len(seen) == 50)) == 50
        await watch.until(lambda seen: seen == ())


async def test_two_watchers_see_the_same(registry: Registry) -> None:
    member = a_member()
    async with (
        registry.open() as discovery,
        discovery.register(member),
        watching(discovery) as one,
        watching(discovery) as two,
    ):
        wanted = (member,)
        assert await one.until(lambda seen: seen == wanted) == wanted
        assert await two.until(lambda seen: seen == wanted) == wanted
