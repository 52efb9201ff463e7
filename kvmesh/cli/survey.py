"""Who is in a mesh, what each is busy with, and who is missing."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from kvmesh.cli.console import CommandError
from kvmesh.cli.procs import Running
from kvmesh.cli.settings import OwnConfig
from kvmesh.clock import SystemClock
from kvmesh.discovery import DiscoveryConfig, create
from kvmesh.errors import MeshError
from kvmesh.rpc.clients import watch_worker
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.types import Load, Member, Role, State, Worker

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
    names = {(process.role, process.pid): process.name for process in started}
    known = {(member.role, member.pid) for member in members}
    starting = [
        Member(process.name, process.role, "", "", State.STARTING, pid=process.pid)
        for process in started
        if (process.role, process.pid) not in known and process.is_alive()
    ]
    loads = await asyncio.gather(*(_load(member, own.rpc) for member in members))
    seen = [
        Seen(names.get((member.role, member.pid), member.id), member, load)
        for member, load in zip(members, loads, strict=True)
    ]
    seen += [Seen(member.id, member) for member in starting]
    return sorted(seen, key=lambda item: (_ORDER.index(item.member.role), item.name))


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
