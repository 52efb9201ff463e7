"""A frontend among fakes: one of each, with switches for what a test wants to go wrong."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter

from kvmesh.errors import UnavailableError
from kvmesh.host.process import App
from kvmesh.testing.fake_tokenizer import FakeTokenizer
from kvmesh.testing.fakes import FakeDecode, FakePrefill, FakeRouter
from kvmesh.testing.mesh import Mesh, Node, mesh
from kvmesh.types import Plan, Role, Worker


@dataclass
class FakeMesh:
    """The parts. `remote`: whether the router plans a remote prefill."""

    mesh: Mesh
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    prefills: list[FakePrefill] = field(default_factory=lambda: [FakePrefill()])
    decodes: list[FakeDecode] = field(default_factory=lambda: [FakeDecode()])
    remote: bool = False
    router: FakeRouter = field(init=False)
    nodes: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give the router its plan."""
        self.router = FakeRouter(self.plan)

    @property
    def prefill(self) -> FakePrefill:
        """The first prefill worker."""
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        """The first decode worker."""
        return self.decodes[0]

    @property
    def frontend(self) -> Node:
        """The frontend."""
        return self.nodes[0]

    @property
    def url(self) -> str:
        """Where the frontend speaks HTTP."""
        return f"http://{self.frontend.member.http_address}"

    def node(self, fake: object) -> Node:
        """Return the node that a fake runs as."""
        return self.nodes[id(fake)]

    def plan(self, start: Any) -> Plan:
        """Plan with the first workers that are not excluded."""
        excluded = start.excluded_worker_ids
        decodes = [w for w in map(self._worker, self.decodes) if w.id not in excluded]
        prefills = [w for w in map(self._worker, self.prefills) if w.id not in excluded]
        if not decodes:
            raise UnavailableError("no decode worker is left")
        prefill = prefills[0] if self.remote and prefills else None
        return Plan(
            decodes[0],
            prefill,
            expected_cached_tokens=2,
            why="fake: the first of each",
            policy="first",
            reason="configured",
            waited=0.25,
        )

    async def idle(self) -> None:
        """Wait until nothing runs in any fake, and no text is open."""
        for fake in (self.tokenizer, self.router, *self.prefills, *self.decodes):
            await fake.idle()
        await self.tokenizer.until(lambda: not self.tokenizer.texts)

    async def gone(self) -> None:
        """Wait until nothing runs in the frontend."""
        await self.tokenizer.until(lambda: not self.frontend.process.gate.running)

    def _worker(self, fake: FakePrefill | FakeDecode) -> Worker:
        member = self.node(fake).member
        return Worker(member.id, member.epoch, member.address)


@asynccontextmanager
async def fake_mesh(  # noqa: PLR0913 - one argument for each switch
    app: App[Any],
    config: Any,
    *,
    prefills: int = 1,
    decodes: int = 1,
    router: bool = True,
    remote: bool = False,
    spans: SpanExporter | SpanProcessor | None = None,
) -> AsyncIterator[FakeMesh]:
    """Yield a frontend, `app` with `config`, in a mesh of fakes."""
    async with mesh(spans=spans) as running:
        fakes = FakeMesh(
            running,
            prefills=[FakePrefill() for _ in range(prefills)],
            decodes=[FakeDecode() for _ in range(decodes)],
            remote=remote,
        )
        everyone = [fakes.tokenizer, *fakes.prefills, *fakes.decodes]
        for fake in [*everyone, *([fakes.router] if router else [])]:
            fakes.nodes[id(fake)] = await running.start(fake.role, fake.app)
        fakes.nodes[0] = await running.start(Role.FRONTEND, app, config)
        yield fakes
