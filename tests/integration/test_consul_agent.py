"""Discovery against a real Consul agent that dies, forgets, refuses and encrypts."""

import asyncio
import itertools
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import aio as grpc_aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvmesh.clock import SystemClock
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.consul import ConsulDiscovery
from kvmesh.discovery.consul_index import Pace
from kvmesh.errors import UnavailableError
from kvmesh.testing.consul import ConsulAgent, consul_binary, free_ports
from kvmesh.testing.member_process import MemberProcess
from kvmesh.types import Member, Role, State

MEMBER = Member("decode-h-7001", Role.DECODE, "e1", "127.0.0.1:7001", State.READY)
OTHER = Member("prefill-h-7002", Role.PREFILL, "e1", "127.0.0.1:7002", State.READY)

Snapshot = tuple[Member, ...]

_prefixes = itertools.count()


@pytest.fixture(scope="module")
def shared_agent() -> Iterator[ConsulAgent]:
    with asyncio.Runner() as runner:
        agent = ConsulAgent()
        runner.run(agent.__aenter__())
        yield agent
        runner.run(agent.__aexit__(None, None, None))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for what can't succeed."""
    monkeypatch.setattr("kvmesh.discovery.consul_registration.STORE_SECONDS", 1.0)


class Watch:
    """Everything a watcher has seen."""

    def __init__(self, snapshots: AsyncIterator[Snapshot]) -> None:
        self._snapshots = snapshots
        self.history: list[Snapshot] = []

    async def until(self, *wanted: Member) -> None:
        async with asyncio.timeout(60):
            while not self.history or self.history[-1] != wanted:
                self.history.append(await anext(self._snapshots))


async def test_a23_first_check_status_is_critical_and_passes_when_ready(
    shared_agent: ConsulAgent,
) -> None:
    config = settings(shared_agent.address)
    starting = replace(MEMBER, state=State.STARTING)
    async with opened(config) as (discovery, watch), discovery.register(starting) as registration:
        await watch.until(starting)
        assert await passing(shared_agent, config) == []
        await registration.set_state(State.READY)
        await watch.until(MEMBER)
        await eventually(shared_agent, config, [MEMBER.id])
        await registration.set_state(State.DRAINING)
        await watch.until(replace(MEMBER, state=State.DRAINING))
        await eventually(shared_agent, config, [])


async def test_a23_a_restarted_process_is_never_ready_by_its_former_lifes_merit(
    shared_agent: ConsulAgent,
) -> None:
    config = settings(shared_agent.address)
    reborn = replace(MEMBER, epoch="e2", state=State.STARTING)
    async with opened(config) as (discovery, watch):
        async with MemberProcess(config, MEMBER) as process:
            await watch.until(MEMBER)
            await process.kill()
            async with discovery.register(reborn):
                assert await passing(shared_agent, config) == []
                await watch.until(reborn)
        assert {member.epoch for seen in watch.history for member in seen} == {"e1", "e2"}


async def test_a43_killed_five_times_and_started_again_is_one_entry(
    shared_agent: ConsulAgent,
) -> None:
    config = settings(shared_agent.address)
    lives = [replace(MEMBER, epoch=f"life{number}") for number in range(5)]
    async with opened(config) as (_, watch), AsyncExitStack() as stack:
        for life in lives:
            process = await stack.enter_async_context(MemberProcess(config, life))
            await watch.until(life)
            if life is not lives[-1]:
                await process.kill()
        services = await shared_agent.get("/v1/agent/services")
        ours = [each for each in services.values() if each["Service"] == service_name(config)]
        assert [each["Meta"]["epoch"] for each in ours] == ["life4"]
        second = replace(MEMBER, id="decode-h-7003", address="127.0.0.1:7003")
        async with MemberProcess(config, second):
            await watch.until(lives[-1], second)


async def test_a18_an_agent_that_restarts_empty_drops_nobody_and_knows_everybody_again() -> None:
    async with ConsulAgent() as agent:
        config = settings(agent.address)
        async with (
            opened(config) as (discovery, watch),
            discovery.register(MEMBER),
            MemberProcess(config, OTHER),
        ):
            await watch.until(MEMBER, OTHER)
            seen = len(watch.history)
            for _ in range(2):
                await agent.kill()
                await agent.start()
                await eventually(agent, config, [MEMBER.id])
                await eventually(agent, config, [OTHER.id], Role.PREFILL)
            later = replace(OTHER, id="prefill-z-1", address="127.0.0.1:7009")
            async with discovery.register(later):
                await watch.until(MEMBER, OTHER, later)
            assert len(watch.history) == seen + 1


async def test_a18_an_agent_that_was_frozen_drops_nobody() -> None:
    async with ConsulAgent() as agent:
        config = settings(agent.address)
        async with (
            opened(config) as (discovery, watch),
            discovery.register(MEMBER),
            MemberProcess(config, OTHER),
        ):
            await watch.until(MEMBER, OTHER)
            seen = len(watch.history)
            agent.signal(signal.SIGSTOP)
            # By the agent's clock all are dead when it moves again.
            await asyncio.sleep(1.5 * config.consul_ttl_seconds)
            agent.signal(signal.SIGCONT)
            await eventually(agent, config, [MEMBER.id])
            await eventually(agent, config, [OTHER.id], Role.PREFILL)
            later = replace(OTHER, id="prefill-z-1", address="127.0.0.1:7009")
            async with discovery.register(later):
                await watch.until(MEMBER, OTHER, later)
            assert len(watch.history) == seen + 1


async def test_a18_an_agent_that_reaps_a_living_member_gets_it_back(
    shared_agent: ConsulAgent,
) -> None:
    config = settings(shared_agent.address)
    async with opened(config) as (discovery, watch), discovery.register(MEMBER):
        await watch.until(MEMBER)
        await shared_agent.put(f"/v1/agent/service/deregister/{MEMBER.id}")
        await watch.until()
        await watch.until(MEMBER)


async def test_a18_members_that_start_while_the_agent_is_away_appear_when_it_is_there(
    impatient: None,
) -> None:
    (port,) = free_ports(1)
    async with AsyncExitStack() as stack:
        agent = ConsulAgent(http_port=port)
        config = settings(f"127.0.0.1:{port}")
        discovery, watch = await stack.enter_async_context(opened(config))
        registration = await stack.enter_async_context(discovery.register(MEMBER))
        with pytest.raises(UnavailableError, match=MEMBER.id):
            await registration.set_state(State.DRAINING)
        await stack.enter_async_context(agent)
        await watch.until(replace(MEMBER, state=State.DRAINING))


async def test_a18_who_lived_through_an_outage_is_kept_and_who_died_in_it_goes() -> None:
    async with ConsulAgent() as agent:
        config = settings(agent.address)
        async with (
            opened(config) as (discovery, watch),
            discovery.register(MEMBER),
            MemberProcess(config, OTHER) as process,
        ):
            await watch.until(MEMBER, OTHER)
            await agent.kill()
            await process.kill()
            await agent.start()
            await watch.until(MEMBER)
            assert all(MEMBER in seen for seen in watch.history[1:])


async def test_a43_an_older_life_that_still_runs_gives_way_and_comes_back(
    shared_agent: ConsulAgent,
) -> None:
    config = settings(shared_agent.address)
    newer = replace(MEMBER, epoch="e2")
    async with opened(config) as (discovery, watch), discovery.register(MEMBER) as older:
        await watch.until(MEMBER)
        async with discovery.register(newer):
            await watch.until(newer)
            await older.set_state(State.DRAINING)
            assert await epoch(shared_agent) == "e2"
        await watch.until(replace(MEMBER, state=State.DRAINING))


async def test_a43_an_older_life_that_leaves_late_takes_nobody_with_it(
    shared_agent: ConsulAgent,
) -> None:
    config = settings(shared_agent.address)
    async with opened(config) as (discovery, _), AsyncExitStack() as older:
        await older.enter_async_context(discovery.register(MEMBER))
        async with discovery.register(replace(MEMBER, epoch="e2")):
            await older.aclose()
            assert await epoch(shared_agent) == "e2"
    assert await epoch(shared_agent) is None


async def test_maintenance_mode_drains_a_member(shared_agent: ConsulAgent) -> None:
    config = settings(shared_agent.address)
    async with opened(config) as (discovery, watch), discovery.register(MEMBER):
        await watch.until(MEMBER)
        await shared_agent.put(f"/v1/agent/service/maintenance/{MEMBER.id}?enable=true")
        await watch.until(replace(MEMBER, state=State.DRAINING))
        await shared_agent.put(f"/v1/agent/service/maintenance/{MEMBER.id}?enable=false")
        await watch.until(MEMBER)


async def test_the_agents_own_grpc_check_decides_too(shared_agent: ConsulAgent) -> None:
    config = replace(settings(shared_agent.address), consul_grpc_check=True)
    server = grpc_aio.server()
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    member = replace(MEMBER, address=f"127.0.0.1:{port}")
    async with opened(config) as (discovery, watch), discovery.register(member):
        await watch.until(replace(member, state=State.STARTING))
        await server.start()
        await watch.until(member)
        await server.stop(None)
        await watch.until(replace(member, state=State.STARTING))


async def test_an_acl_token_opens_what_is_denied_without(impatient: None) -> None:
    token = "7f3d6a4e-0d4c-4a58-9c3d-0a4f3d1c9a11"
    acl = {"enabled": True, "default_policy": "deny", "tokens": {"master": token, "agent": token}}
    async with ConsulAgent({"acl": acl}, token=token) as agent:
        config = replace(settings(agent.address), consul_token=token)
        async with opened(config) as (discovery, watch), discovery.register(MEMBER) as registration:
            await watch.until(MEMBER)
            await registration.set_state(State.DRAINING)
            await watch.until(replace(MEMBER, state=State.DRAINING))
        async with (
            opened(settings(agent.address)) as (stranger, _),
            stranger.register(OTHER) as refused,
        ):
            with pytest.raises(UnavailableError):
                await refused.set_state(State.READY)


async def test_https_with_client_certificates(tmp_path: Path, impatient: None) -> None:
    await asyncio.to_thread(make_certificates, tmp_path)
    (https,) = free_ports(1)
    tls = {
        "ca_file": str(tmp_path / "consul-agent-ca.pem"),
        "cert_file": str(tmp_path / "dc1-server-consul-0.pem"),
        "key_file": str(tmp_path / "dc1-server-consul-0-key.pem"),
        "verify_incoming_https": True,
        "ports": {"https": https},
    }
    async with ConsulAgent(tls):
        plain = replace(
            settings(f"127.0.0.1:{https}"),
            consul_tls=True,
            consul_ca_file=str(tmp_path / "consul-agent-ca.pem"),
        )
        config = replace(
            plain,
            consul_cert_file=str(tmp_path / "dc1-client-consul-0.pem"),
            consul_key_file=str(tmp_path / "dc1-client-consul-0-key.pem"),
        )
        async with opened(config) as (discovery, watch), discovery.register(MEMBER):
            await watch.until(MEMBER)
        async with opened(plain) as (nobody, _), nobody.register(MEMBER) as refused:
            with pytest.raises(UnavailableError):
                await refused.set_state(State.READY)


def make_certificates(directory: Path) -> None:
    for command in (
        "tls ca create",
        "tls cert create -server -additional-ipaddress=127.0.0.1",
        "tls cert create -client",
    ):
        arguments = [str(consul_binary()), *command.split()]
        subprocess.run(arguments, cwd=directory, check=True, capture_output=True)


def settings(address: str) -> DiscoveryConfig:
    return DiscoveryConfig(
        kind=DiscoveryKind.CONSUL,
        consul_address=address,
        consul_prefix=f"agent{next(_prefixes)}",
        consul_ttl_seconds=2.0,
    )


@asynccontextmanager
async def opened(config: DiscoveryConfig) -> AsyncIterator[tuple[ConsulDiscovery, Watch]]:
    pace = Pace(wait=10, period=0.02, grace=6.0)
    async with ConsulDiscovery(config, SystemClock(), random.Random(1), pace=pace) as discovery:
        snapshots = discovery.watch()
        try:
            yield discovery, Watch(snapshots)
        finally:
            await snapshots.aclose()  # type: ignore[attr-defined]


def service_name(config: DiscoveryConfig, role: Role = Role.DECODE) -> str:
    return f"{config.consul_prefix}-{role}"


async def passing(
    agent: ConsulAgent, config: DiscoveryConfig, role: Role = Role.DECODE
) -> list[str]:
    """Return the ids that Consul itself would route to."""
    found = await agent.get(f"/v1/health/service/{service_name(config, role)}?passing=1")
    return [instance["Service"]["ID"] for instance in found]


async def epoch(agent: ConsulAgent) -> str | None:
    """Return the epoch that the agent holds for our member right now."""
    services = await agent.get("/v1/agent/services")
    return services[MEMBER.id]["Meta"]["epoch"] if MEMBER.id in services else None


async def eventually(
    agent: ConsulAgent, config: DiscoveryConfig, ids: list[str], role: Role = Role.DECODE
) -> None:
    async with asyncio.timeout(60):
        while await passing(agent, config, role) != ids:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
