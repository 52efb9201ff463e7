"""Who is in a mesh, what each is busy with, and who is missing."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from kvmesh.cli.console import CommandError
from kvmesh.cli.plan import DiscoveryChoice
from kvmesh.cli.procs import Running
from kvmesh.cli.settings import OwnConfig
from kvmesh.cli.state import ClusterState, StateDir
from kvmesh.clock import SystemClock
from kvmesh.discovery import DiscoveryConfig, create
from kvmesh.errors import MeshError
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.workers import watch_worker
from kvmesh.types import Load, Member, Role, State, Worker

CONSUL_AGENT = "127.0.0.1:8500"
"""Where a Consul agent is by default."""

Registry = Annotated[
    DiscoveryChoice | None,
    typer.Option(help="Look into this registry; else where the local cluster is."),
]

ConsulAgent = Annotated[str, typer.Option(help="HTTP address of the Consul agent.")]

_REGISTRY_SECONDS = 5.0
_WORKER_SECONDS = 3.0

_ORDER = tuple(Role)
_WORKERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Seen:
    """A process that runs. `load` is None for what is no worker, or doesn't answer."""

    name: str
    member: Member
    load: Load | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as `kvmesh status --json` shows it."""
        member = {k: v for k, v in asdict(self.member).items() if k != "labels"}
        return {
            "name": self.name,
            **member,
            "load": asdict(self.load) if self.load else None,
        }


def found_in(
    state: StateDir, cluster: ClusterState | None, choice: DiscoveryChoice | None, consul_addr: str
) -> dict[str, str]:
    """Return the discovery settings of the registry to look into."""
    if choice is DiscoveryChoice.CONSUL:
        return {"kind": choice.value, "consul_address": consul_addr}
    if choice is None and cluster is not None:
        return cluster.discovery
    return {"kind": DiscoveryChoice.LOCAL.value, "directory": str(state.members)}


async def members_of(config: DiscoveryConfig) -> tuple[Member, ...]:
    """Return the membership now. Raises CommandError if the registry doesn't answer."""
    try:
        async with (
            asyncio.timeout(_REGISTRY_SECONDS),
            create(config, SystemClock(), random.Random()) as discovery,
            aclosing(discovery.watch()) as updates,  # type: ignore[type-var]
        ):
            return await anext(updates)
    except TimeoutError:
        where = f"Consul at {config.consul_address}" if config.kind == "consul" else config.kind
        raise CommandError(f"the registry does not answer: {where}") from None


async def survey(own: OwnConfig, started: Sequence[Running]) -> list[Seen]:
    """Return all that runs: what the registry knows, and what has been started and isn't there yet.

    Raises CommandError if the registry doesn't answer.
    """
    members = await members_of(own.discovery)
    names = names_of(members, started)
    known = {(member.role, member.pid) for member in members}
    starting = [
        Member(process.name, process.role, "", "", State.STARTING, pid=process.pid)
        for process in started
        if (process.role, process.pid) not in known and process.is_alive()
    ]
    loads = await asyncio.gather(*(_load(member, own.rpc) for member in members))
    seen = [
        Seen(names.get(member.id, member.id), member, load)
        for member, load in zip(members, loads, strict=True)
    ]
    seen += [Seen(member.id, member) for member in starting]
    return sorted(seen, key=lambda item: (_ORDER.index(item.member.role), item.name))


def names_of(members: Sequence[Member], started: Sequence[Running]) -> dict[str, str]:
    """Return what members that have been started here are called here, by id."""
    names = {(process.role, process.pid): process.name for process in started}
    return {m.id: names[m.role, m.pid] for m in members if (m.role, m.pid) in names}


async def _load(member: Member, config: RpcConfig) -> Load | None:
    """Return what a worker is busy with, by its own word."""
    if member.role not in _WORKERS:
        return None
    peer = Peer(Worker(member.id, member.epoch, member.address), "kvmesh-status", config)
    try:
        async with asyncio.timeout(_WORKER_SECONDS):
            async for news in watch_worker(peer, "kvmesh-status"):
                for event in news.events:
                    if isinstance(event, Load):
                        return event
    except (MeshError, TimeoutError):
        return None
    finally:
        await peer.aclose()
    return None
