"""Hundreds of random requests through one prefill and two decode workers leave nothing behind.

Real services and gRPC, real KV over NIXL, on the light engine with a tiny model.
"""

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.engine.factory import EngineConfig
from kvmesh.host.config import ModelConfig
from kvmesh.kv.ledger import Ledger
from kvmesh.testing.cluster import until
from kvmesh.testing.engine_torch import CONFIG, tiny_llama
from kvmesh.testing.mesh import Mesh, Node, mesh, worker
from kvmesh.types import Role
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.frontend.app import app as frontend_app
from services.frontend.config import FrontendConfig, HttpConfig
from services.prefill.app import app as prefill_app
from services.prefill.config import PrefillConfig
from services.router.app import app as router_app
from services.router.config import RouterConfig
from services.tokenizer.app import app as tokenizer_app
from services.tokenizer.config import TokenizerConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS = 500
AT_ONCE = 24
MODEL = "tiny"
GROWTH_BYTES = 48 << 20
"""What a process may grow by over the second half of a soak: caches, not a leak."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / MODEL)


@asynccontextmanager
async def served(
    folder: Path, handoff: str = "sequential"
) -> AsyncIterator[tuple[Mesh, httpx.AsyncClient]]:
    model = ModelConfig(path=folder, name=MODEL)
    light = replace(CONFIG, kv_transport="nixl", kv_cache_mb=2, max_batch=16, handoff=handoff)
    engine = EngineConfig(name="torch", torch=light)
    decoding = DecodeConfig(model=model, engine=engine)
    async with mesh() as running:
        await running.start(Role.TOKENIZER, tokenizer_app, TokenizerConfig(model=model))
        await running.start(
            Role.PREFILL, worker(prefill_app), PrefillConfig(model=model, engine=engine)
        )
        for _ in range(2):
            await running.start(Role.DECODE, worker(decode_app), decoding)
        await running.start(Role.ROUTER, router_app, RouterConfig())
        config = FrontendConfig(http=HttpConfig(port=0))
        frontend = await running.start(Role.FRONTEND, frontend_app, config)
        url = f"http://{frontend.member.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            await until(lambda: _routable(client))
            yield running, client


async def _routable(client: httpx.AsyncClient) -> bool:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    return (await client.post("/v1/completions", json=body)).status_code == 200


def body(rng: random.Random) -> dict[str, Any]:
    """A random request: shared prefixes, all lengths, greedy and seeded sampling."""
    shared = "shared words " * rng.choice((0, 2, 8, 16))
    own = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 120)))
    sampling: dict[str, Any] = {"temperature": 0}
    if rng.random() < 0.5:
        sampling = {
            "temperature": rng.uniform(0.1, 2),
            "seed": rng.randrange(100),
            "top_p": rng.uniform(0.1, 1),
            "top_k": rng.choice((-1, 1, 5, 50)),
            "presence_penalty": rng.uniform(-2, 2),
            "repetition_penalty": rng.uniform(0.5, 2),
        }
    return {
        "model": MODEL,
        "prompt": shared + own,
        "max_tokens": rng.randint(1, 48),
        "stop": rng.choice((None, ["zz"], ["a", "e"])),
        "stream": True,
        **sampling,
    }


async def ask(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Send one request; read it to the end, or leave at a random point."""
    events = rng.choice((0, 1, 2, 5, 10_000, 10_000, 10_000))
    async with client.stream("POST", "/v1/completions", json=body(rng)) as response:
        assert response.status_code == 200
        if not events:
            return
        async for line in response.aiter_lines():
            assert '"error"' not in line, line
            events -= line.startswith("data: ")
            if events <= 0:
                return


async def soak(client: httpx.AsyncClient, seed: int, requests: int) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            await ask(client, random.Random(f"{seed}/{number}"))

    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(one(number))


def samples(node: Node) -> dict[str, float]:
    """A process's metrics, labels summed up, by name."""
    sums: dict[str, float] = {}
    for line in node.process.telemetry.render().decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def held(running: Mesh) -> dict[str, float]:
    """What is still held anywhere, by name; nothing when all is well."""
    found: dict[str, float] = {}
    for node in running.nodes:
        found[f"{node.member.id} requests"] = node.process.gate.running
        found |= {f"{node.member.id} {k}": v for k, v in samples(node).items() if k in HELD}
    return {name: count for name, count in found.items() if count}


def received(running: Mesh) -> list[float]:
    """Bytes of KV that each decode worker pulled."""
    decodes = [node for node in running.nodes if node.member.role is Role.DECODE]
    return [samples(node)["kvmesh_kv_received_bytes_total"] for node in decodes]


HELD = frozenset(
    f"kvmesh_engine_{what}" for what in ("running", "waiting", "used_blocks", "ticket_bytes")
)


def rss() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_nothing_is_left_after_hundreds_of_random_requests(folder: Path) -> None:
    async with served(folder) as (running, client):
        await soak(client, 1, REQUESTS // 2)
        await until(lambda: not held(running), 20)
        before = rss()
        await soak(client, 2, REQUESTS // 2)
        await until(lambda: not held(running), 20)
        assert rss() - before < GROWTH_BYTES
        assert all(received(running)), "a decode worker never pulled KV"


async def test_nothing_is_left_where_decode_begins_beside_prefill(folder: Path) -> None:
    async with served(folder, "concurrent") as (running, client):
        await soak(client, 3, REQUESTS // 2)
        await until(lambda: not held(running), 20)
        assert all(received(running)), "a decode worker never pulled KV"
        (frontend,) = (node for node in running.nodes if node.member.role is Role.FRONTEND)
        assert "kvmesh_retries_total" not in samples(frontend)


async def test_the_soak_finds_a_planted_leak(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = Ledger.release, iter(range(10**9))

    def forgetful(self: Ledger, *arguments: Any) -> Any:
        # One pull in twenty ends its lease without anybody noticing.
        lease = release(self, *arguments)
        return replace(lease, blocks=lease.blocks[1:]) if lease and next(calls) % 20 == 7 else lease

    monkeypatch.setattr(Ledger, "release", forgetful)
    async with served(folder) as (running, client):
        await soak(client, 1, 120)
        with pytest.raises(TimeoutError):
            await until(lambda: not held(running), 3)
        assert any("used_blocks" in name for name in held(running))
