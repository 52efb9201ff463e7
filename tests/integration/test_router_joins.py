"""A router that joins late decides as one does that was there all the time.

Real services and gRPC in one process: simulated engines, two routers, no frontend.
"""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.engine.factory import EngineConfig
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.host.config import ModelConfig
from kvmesh.kv.blocks import block_hashes
from kvmesh.models import tiny_folder
from kvmesh.rpc.clients import RouteQuery, decode, route
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.testing.mesh import Mesh, Node, mesh, worker
from kvmesh.types import Context, Plan, Role, Sampling, Worker
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.router.app import app as router_app
from services.router.config import RouterConfig

MODEL = "joined"
WORKERS = 4
BLOCK = 16
CLOCK = SystemClock()


@dataclass
class Rig:
    """Workers with caches of their own, and the ways to them."""

    mesh: Mesh
    stack: AsyncExitStack
    workers: list[Node]
    prompts: list[list[int]]

    def peer(self, node: Node) -> Peer:
        member = node.member
        peer = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
        self.stack.push_async_callback(peer.aclose)
        return peer

    async def router(self) -> Peer:
        return self.peer(await self.mesh.start(Role.ROUTER, router_app, RouterConfig()))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Yield workers of which each has computed some prompts."""
    folder = tmp_path / MODEL
    tiny_folder(folder, context_length=4096)
    sim = SimConfig(block_size=BLOCK, latency=Latency(speed=0))
    config = DecodeConfig(
        model=ModelConfig(path=folder, name=MODEL), engine=EngineConfig(name="sim", sim=sim)
    )
    rng = random.Random(1)
    async with mesh() as running, AsyncExitStack() as stack:
        workers = [
            await running.start(Role.DECODE, worker(decode_app), config) for _ in range(WORKERS)
        ]
        prompts = [[rng.randrange(32, 127) for _ in range(20 * BLOCK)] for _ in range(12)]
        found = Rig(running, stack, workers, prompts)
        for number, prompt in enumerate(prompts):
            peer = found.peer(workers[number % WORKERS])
            await compute(peer, prompt, Context(f"fill-{number}"))
        yield found


async def compute(peer: Peer, prompt: list[int], context: Context) -> None:
    call = decode(peer, prompt, Sampling(1), context, CLOCK, ticket=None, sink=lambda *_: None)
    async with call:
        await call.completion


async def plan(router: Peer, prompt: list[int]) -> Plan:
    hashes = block_hashes(prompt, BLOCK, MODEL)
    query = RouteQuery(
        MODEL, prompt_tokens=len(prompt), max_tokens=8, block_hashes=hashes, block_size=BLOCK
    )
    async with route(router, query, Context("r"), CLOCK) as call:
        return await call.value


def decided(found: Plan) -> Plan:
    """Leave out what is new each time."""
    return replace(found, waited=0.0, why="")


async def test_its_first_decision_is_that_of_one_that_was_there(rig: Rig) -> None:
    first = await rig.router()
    due = [decided(await plan(first, prompt)) for prompt in rig.prompts]
    for number, each in enumerate(due):
        assert each.decode.id == rig.workers[number % WORKERS].member.id
        assert each.expected_cached_tokens > 0
    for number, prompt in enumerate(rig.prompts):
        late = await rig.router()
        # The very first one: a worker gets no requests before its cache is known.
        assert decided(await plan(late, prompt)) == due[number]
