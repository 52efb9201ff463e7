"""A small mesh in one process, for integration tests: real gRPC, discovery in memory."""

import itertools
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter

from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery.base import Registration
from kvmesh.host.process import App, Process, Service, show_gate
from kvmesh.host.worker import WorkerApp, WorkerConfig, running_engine
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.server import MeshServer, serve
from kvmesh.telemetry import quiet_telemetry
from kvmesh.testing.discovery import MemoryDiscovery
from kvmesh.types import Member, Role, State


@dataclass(slots=True)
class Node:
    """One running process of the mesh, or what would be one."""

    member: Member
    process: Process
    service: Service
    server: MeshServer
    _registration: Registration
    _stack: AsyncExitStack
    _mesh: "Mesh"

    async def drain(self, seconds: float = 10.0) -> bool:
        """End as on SIGTERM: leave routing, finish what runs, close. Whether all ended."""
        await self._registration.set_state(State.DRAINING)
        finished = await self.server.drain(self.process.gate, self.service.settled, seconds)
        await self.stop()
        return finished

    async def stop(self) -> None:
        """Leave the registry and close at once. Idempotent."""
        await self._stack.aclose()

    async def kill(self) -> None:
        """Die: the registry forgets it, connections break, nothing is told to anybody."""
        self._mesh.discovery.crash(self.member.id)
        await self.stop()


class Mesh:
    """Starts nodes. Use `mesh()`, which stops them in the end."""

    def __init__(self, clock: Clock, spans: SpanExporter | SpanProcessor | None) -> None:
        self.discovery = MemoryDiscovery()
        self.nodes: list[Node] = []
        self._clock = clock
        self._spans = spans
        self._numbers = itertools.count()

    async def start(
        self,
        role: Role,
        app: App[Any],
        config: Any = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> Node:
        """Run a role's app as its process would, on a free port of this machine."""
        name = f"{role}-{next(self._numbers)}"
        process = Process(
            id=name,
            role=role,
            epoch=uuid.uuid4().hex,
            clock=self._clock,
            rng=random.Random(name),
            telemetry=quiet_telemetry(self._spans),
            discovery=self.discovery,
            gate=Gate(),
            environ=environ or {},
        )
        show_gate(process.telemetry.meter, role, process.gate)
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(app(config, process))
            rpc = replace(getattr(config, "rpc", RpcConfig()), host="127.0.0.1", port=0)
            server = await stack.enter_async_context(serve(rpc, dict(service.registrations)))
            member = Member(
                id=name,
                role=role,
                epoch=process.epoch,
                address=f"127.0.0.1:{server.port}",
                **service.details,
            )
            registration = await stack.enter_async_context(self.discovery.register(member))
            await server.set_serving(True)
            await registration.set_state(State.READY)
            node = Node(member, process, service, server, registration, stack.pop_all(), self)
        self.nodes.append(node)
        return node

    async def aclose(self) -> None:
        """Stop every node, the newest first."""
        while self.nodes:
            await self.nodes.pop().stop()


def worker(app: WorkerApp) -> App[Any]:
    """Return a worker's app with its engine in it, as the other roles' apps are."""

    @asynccontextmanager
    async def whole(config: WorkerConfig, process: Process) -> AsyncIterator[Service]:
        async with running_engine(config, process) as running:
            yield app(process, running)

    return whole


@asynccontextmanager
async def mesh(
    *, clock: Clock | None = None, spans: SpanExporter | SpanProcessor | None = None
) -> AsyncIterator[Mesh]:
    """Yield an empty mesh; stop what was started in it. Spans of all nodes go to `spans`."""
    running = Mesh(clock or SystemClock(), spans)
    try:
        yield running
    finally:
        await running.aclose()
