"""What the router thinks is cached is what the engine finds cached."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from kvmesh.testing.mesh import Node, mesh, worker
from kvmesh.testing.tokenizer_folders import byte_level_folder
from kvmesh.types import Role
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.frontend.app import app as frontend_app
from services.frontend.config import FrontendConfig, HttpConfig
from services.router.app import app as router_app
from services.router.config import RouterConfig
from services.tokenizer.app import app as tokenizer_app
from services.tokenizer.config import TokenizerConfig

MODEL = "tiny"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = "What is the capital of France, and how far is it from the sea? " * 6


class Rig:
    """Two workers of one block size behind a router, and a client."""

    def __init__(self, router: Node, client: httpx.AsyncClient) -> None:
        self._router = router
        self._client = client

    async def ask(self, path: str, **more: Any) -> tuple[int, int, dict[str, Any]]:
        """Return what the router expected to be cached, what was, and the answer."""
        before = self._told()
        body = {"model": MODEL, "temperature": 0, "max_tokens": 4, **more}
        response = await self._client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        total = before["prompt"] + answer["usage"]["prompt_tokens"]
        await until(lambda: self._told()["prompt"] == total)
        after = self._told()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert after["cached"] - before["cached"] == cached
        return int(after["expected_cached"] - before["expected_cached"]), cached, answer

    async def ids(self, **prompt: Any) -> list[int]:
        """Return a prompt's token ids."""
        response = await self._client.post("/tokenize", json={"model": MODEL, **prompt})
        assert response.status_code == 200, response.text
        found: list[int] = response.json()["tokens"]
        return found

    async def heard(self, blocks: int) -> None:
        """Wait until the router was told of so many blocks on one worker."""
        await until(lambda: max(self._shown("kvmesh_router_cached_blocks")) >= blocks)

    @property
    def disagreements(self) -> float:
        """Answers that were not what the router expected."""
        return sum(self._shown("kvmesh_router_disagreements_total"))

    def _told(self) -> dict[str, float]:
        names = ("prompt", "cached", "expected_cached")
        return {name: sum(self._shown(f"kvmesh_router_{name}_tokens_total")) for name in names}

    def _shown(self, name: str) -> list[float]:
        page = self._router.process.telemetry.render().decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in page if line.startswith(name)]


@asynccontextmanager
async def rig(folder: Path, block_size: int) -> AsyncIterator[Rig]:
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    facts = {"vocab_size": size, "max_position_embeddings": 4096, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    sim = SimConfig(sample_from=10, block_size=block_size, latency=Latency(speed=0))
    model = ModelConfig(path=folder, name=MODEL)
    async with mesh() as running:
        router = await running.start(Role.ROUTER, router_app, RouterConfig())
        await running.start(Role.TOKENIZER, tokenizer_app, TokenizerConfig(model=model))
        for _ in range(2):
            decode = DecodeConfig(model=model, engine=EngineConfig(name="sim", sim=sim))
            await running.start(Role.DECODE, worker(decode_app), decode)
        config = FrontendConfig(http=HttpConfig(port=0))
        frontend = await running.start(Role.FRONTEND, frontend_app, config)
        url = f"http://{frontend.member.http_address}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:

            async def serves() -> bool:
                body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
                return (await client.post(TEXT, json=body)).status_code == 200

            await until(serves)
            yield Rig(router, client)


@pytest.mark.parametrize("block_size", [16, 32])
async def test_a13_what_is_expected_to_be_cached_is_found_cached(
    tmp_path: Path, block_size: int
) -> None:
    async with rig(byte_level_folder(tmp_path / MODEL), block_size) as one:
        first = [{"role": "user", "content": QUESTION}]
        expected, cached, answer = await one.ask(CHAT, messages=first)
        assert (expected, cached) == (0, 0)

        ids = await one.ids(messages=first)
        usable = (len(ids) - 1) // block_size
        await one.heard(usable)
        for path, prompt in ((CHAT, {"messages": first}), (TEXT, {"prompt": ids})):
            expected, cached, _ = await one.ask(path, **prompt)
            assert expected == cached == usable * block_size > 0

        reply = answer["choices"][0]["message"]
        longer = [*first, {"role": reply["role"], "content": reply["content"]}]
        longer.append({"role": "user", "content": "bar"})
        expected, cached, _ = await one.ask(CHAT, messages=longer)
        assert expected == cached > 0

        await one.ask(TEXT, prompt="foo " * 200)
        shared = await one.ids(prompt="foo " * 200)
        await one.heard(len(shared) // block_size)
        expected, cached, _ = await one.ask(TEXT, prompt="foo " * 200 + "bar")
        # "foo " and "bar" are not the tokens of "foo bar": the block before the border may miss.
        assert expected == cached >= (len(shared) // block_size - 1) * block_size > 0
        assert one.disagreements == 0
