"""The frontend with the real services in one process: simulated engines, KV moved for real."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from kvmesh.engine.factory import EngineConfig
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.host.config import ModelConfig
from kvmesh.testing.cluster import until
from kvmesh.testing.mesh import Mesh, Node, mesh, worker
from kvmesh.testing.tokenizer_folders import byte_level_folder
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

MODEL = "tiny"
LONG = "The capital of France is Paris, and the capital of Italy is Rome. " * 12


@dataclass
class Real:
    mesh: Mesh
    workers: dict[Role, list[Node]]
    frontend: Node
    client: httpx.AsyncClient

    async def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, **more}
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, role: Role, name: str) -> float:
        pages = [node.process.telemetry.render().decode() for node in self.workers[role]]
        lines = [line for page in pages for line in page.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def idle(self) -> None:
        def settled() -> bool:
            nodes = [self.frontend, *(node for nodes in self.workers.values() for node in nodes)]
            blocks = (
                self.metric(role, "kvmesh_engine_ticket_blocks")
                for role in (Role.PREFILL, Role.DECODE)
            )
            return not any(node.process.gate.running for node in nodes) and not any(blocks)

        await until(settled)


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[Real]:
    folder = byte_level_folder(tmp_path / "model")
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    facts = {"vocab_size": size, "max_position_embeddings": 2048, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    sim = SimConfig(sample_from=10, latency=Latency(speed=0.0))
    model = ModelConfig(path=folder, name=MODEL)
    engine = EngineConfig(name="sim", sim=sim)
    async with mesh() as running:
        workers = {
            Role.TOKENIZER: [
                await running.start(Role.TOKENIZER, tokenizer_app, TokenizerConfig(model=model))
            ],
            Role.PREFILL: [
                await running.start(
                    Role.PREFILL, worker(prefill_app), PrefillConfig(model=model, engine=engine)
                )
                for _ in range(2)
            ],
            Role.DECODE: [
                await running.start(
                    Role.DECODE, worker(decode_app), DecodeConfig(model=model, engine=engine)
                )
                for _ in range(2)
            ],
        }
        workers[Role.ROUTER] = [await running.start(Role.ROUTER, router_app, RouterConfig())]
        config = FrontendConfig(http=HttpConfig(port=0))
        frontend = await running.start(Role.FRONTEND, frontend_app, config)
        url = f"http://{frontend.member.http_address}"
        async with httpx.AsyncClient(
            base_url=url, verify=False, trust_env=False, timeout=60
        ) as client:
            one = Real(running, workers, frontend, client)
            await until(lambda: _routable(one))
            yield one


async def _routable(real: Real) -> bool:
    """Return whether the router has heard from the workers, too."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    return (await real.client.post("/v1/completions", json=body)).status_code == 200


async def test_text_is_the_same_wherever_it_was_computed(real: Real) -> None:
    moved = real.metric(Role.DECODE, "kvmesh_kv_received_bytes_total")
    remote = await real.complete(LONG, max_tokens=40)
    await real.idle()
    assert real.metric(Role.DECODE, "kvmesh_kv_received_bytes_total") > moved
    for node in real.workers[Role.PREFILL]:
        await node.stop()
    local = await real.complete(LONG, max_tokens=40)
    assert local["choices"][0]["text"] == remote["choices"][0]["text"]
    counts = ("prompt_tokens", "completion_tokens")
    assert [local["usage"][name] for name in counts] == [remote["usage"][name] for name in counts]
    assert remote["usage"]["completion_tokens"] == 40
    await real.idle()


async def test_many_requests_at_once_each_get_their_own_text(real: Real) -> None:
    prompts = [f"{n} {LONG}" for n in range(8)]
    alone = [(await real.complete(p, max_tokens=24))["choices"][0]["text"] for p in prompts]
    assert len(set(alone)) == len(alone)
    together = await asyncio.gather(*(real.complete(p, max_tokens=24) for p in prompts * 8))
    assert [answer["choices"][0]["text"] for answer in together] == alone * 8
    await real.idle()


async def test_a_stop_string_ends_the_text_and_frees_everything(real: Real) -> None:
    whole = (await real.complete(LONG, max_tokens=200))["choices"][0]["text"]
    stop = whole[60:64]
    cut = await real.complete(LONG, max_tokens=200, stop=stop)
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    await real.idle()
