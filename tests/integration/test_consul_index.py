"""The rules of blocking queries against a scripted agent."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvmesh.clock import SystemClock
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.consul import ConsulDiscovery
from kvmesh.discovery.consul_index import Pace
from kvmesh.discovery.consul_service import alive_check
from kvmesh.discovery.entry import Entry, to_text
from kvmesh.testing.fake_consul import Answer, FakeConsul
from kvmesh.types import Member, Role, State

SERVICE = "kvmesh-decode"
PACE = Pace(wait=5, period=0.001, pause=0.002, grace=60.0)
HUGE = "18446744073709551615"

Watch = AsyncIterator[tuple[Member, ...]]


async def test_a20_indexes_that_go_back_are_zero_missing_or_huge() -> None:
    indexes = ["100", "100", "40", "41", "0", None, HUGE, HUGE]
    script = [Answer(index, [instance("a")]) for index in indexes]
    async with FakeConsul({SERVICE: script}) as consul, watching(consul) as watch:
        assert names(await anext(watch)) == ["a"]
        queries = await consul.wait_for_queries(SERVICE, len(script) + 1)
        asked = [query.index for query in queries]
        assert asked == [None, "100", "100", None, "41", "1", "1", HUGE, HUGE]


async def test_a20_new_indexes_with_the_same_body_are_no_change() -> None:
    same = [Answer(str(index), [instance("a")]) for index in range(1, 50)]
    script = [*same, Answer("50", [instance("a"), instance("b")])]
    async with FakeConsul({SERVICE: script}) as consul, watching(consul) as watch:
        assert names(await anext(watch)) == ["a"]
        assert names(await anext(watch)) == ["a", "b"]
        assert len(await consul.wait_for_queries(SERVICE, len(script) + 1)) == len(script) + 1


async def test_a18_an_agent_that_comes_back_empty_loses_nobody_who_registers_again() -> None:
    script = [
        Answer("900", [instance("a"), instance("b")]),
        Answer("3", []),
        Answer("4", [instance("b", State.DRAINING)]),
        Answer("5", [instance("a"), instance("b", State.DRAINING)]),
        Answer("6", [instance("a")]),
    ]
    async with FakeConsul({SERVICE: script}) as consul, watching(consul) as watch:
        assert names(await anext(watch)) == ["a", "b"]
        seen = await anext(watch)
        assert [(member.id, member.state) for member in seen] == [
            ("a", State.READY),
            ("b", State.DRAINING),
        ]
        await consul.wait_for_queries(SERVICE, len(script) + 1)


async def test_a18_errors_and_nonsense_leave_the_last_known_members_and_restart_the_index() -> None:
    script = [
        Answer("7", [instance("a")]),
        Answer("8", [], status=500),
        Answer(None, [], status=403),
        Answer("8", [], status=404),
        Answer("9", [{"Service": 5}, instance("a"), instance("b")]),
    ]
    async with FakeConsul({SERVICE: script}) as consul, watching(consul) as watch:
        assert names(await anext(watch)) == ["a"]
        assert names(await anext(watch)) == ["a", "b"]
        queries = await consul.wait_for_queries(SERVICE, len(script) + 1)
        assert [query.index for query in queries] == [None, "7", None, None, None, "9"]


async def test_nothing_is_yielded_before_every_role_has_answered() -> None:
    scripts = {SERVICE: [Answer("1", [instance("a")])], "kvmesh-router": [Answer("1", status=500)]}
    async with FakeConsul(scripts) as consul, watching(consul) as watch:
        first = asyncio.ensure_future(anext(watch))
        await consul.wait_for_queries("kvmesh-router", 2)
        assert not first.done()
        first.cancel()
        await asyncio.wait((first,))


async def test_the_token_is_sent_and_the_environment_does_not_replace_it(
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", "of-somebody-else")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with FakeConsul({}) as consul, watching(consul, token="ours") as watch:
        await anext(watch)
        assert {query.token for query in consul.queries} == {"ours"}


async def test_a43_one_process_seen_through_two_agents_is_one_member() -> None:
    old, new = instance("a", epoch="e1", since=1), instance("a", epoch="e2", since=2, node="n2")
    async with (
        FakeConsul({SERVICE: [Answer("1", [new, old])]}) as consul,
        watching(consul) as watch,
    ):
        assert [member.epoch for member in await anext(watch)] == ["e2"]


@asynccontextmanager
async def watching(consul: FakeConsul, token: str = "") -> AsyncIterator[Watch]:
    config = DiscoveryConfig(
        kind=DiscoveryKind.CONSUL, consul_address=consul.address, consul_token=token
    )
    async with ConsulDiscovery(config, SystemClock(), random.Random(1), pace=PACE) as discovery:
        watch = discovery.watch()
        try:
            async with asyncio.timeout(60):
                yield watch
        finally:
            await watch.aclose()  # type: ignore[attr-defined]


def instance(
    name: str, state: State = State.READY, *, epoch: str = "e", since: int = 1, node: str = "n1"
) -> Mapping[str, Any]:
    member = Member(name, Role.DECODE, epoch, f"{name}:1", state)
    return {
        "Node": {"Node": node},
        "Service": {"ID": name, "Meta": to_text(Entry(member, since))},
        "Checks": [{"CheckID": alive_check(member), "Status": "passing"}],
    }


def names(members: Sequence[Member]) -> list[str]:
    return [member.id for member in members]
