"""Clusters of real processes on the simulated engine: load, signals, Consul."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.testing.cluster import Cluster, cluster, until
from kvmesh.testing.consul import ConsulAgent

PACED = ("--set", "engine.sim.latency.decode_us_per_step=20000")
CHAT = "/v1/chat/completions"


def ask(content: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "model": more.pop("model", None),
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }


async def model_of(mesh: Cluster) -> str:
    async with mesh.client() as client:
        return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    got: dict[str, Any] = response.json()
    return got


async def chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text_of(parts: Sequence[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content") or "" for part in parts for choice in part["choices"]
    )


async def idle(mesh: Cluster) -> bool:
    """Whether no worker holds anything for anybody."""
    workers = [*await mesh.of("prefill"), *await mesh.of("decode")]
    return all(
        w["load"] and not (w["load"]["running"] or w["load"]["waiting"] or w["load"]["used_blocks"])
        for w in workers
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


async def test_a_thousand_concurrent_requests_on_two_and_two_are_correct_and_complete(
    state: Path,
) -> None:
    fast = ("--set", "engine.sim.latency.speed=0")
    async with cluster(state, "--engine", "sim", "--prefill", "2", "--decode", "2", *fast) as mesh:
        model = await model_of(mesh)
        limits = httpx.Limits(max_connections=1000)
        async with httpx.AsyncClient(
            base_url=mesh.url, timeout=120, limits=limits, trust_env=False
        ) as client:
            # Short prompts are prefilled by decode, long ones remotely.
            prompts = [f"{'long ' * (40 * (n % 2))}prompt number {n}" for n in range(100)]
            alone = [await answer(client, ask(p, model=model)) for p in prompts]
            many = await asyncio.gather(
                *(answer(client, ask(prompts[n % 100], model=model)) for n in range(1000))
            )
        for n, got in enumerate(many):
            expected = alone[n % 100]
            assert got["choices"] == expected["choices"]
            assert got["usage"]["completion_tokens"] == 16
            assert got["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        for role in ("prefill", "decode"):
            served = [(await mesh.metrics(w)) for w in await mesh.of(role)]
            assert len(served) == 2
        received = [w["load"]["received_bytes"] for w in await mesh.of("decode")]
        assert all(received), "a decode worker never pulled KV"
        await until(lambda: idle(mesh))


async def test_clients_that_leave_free_everything_streaming_or_not(state: Path) -> None:
    async with cluster(state, "--engine", "sim", *PACED) as mesh:
        model = await model_of(mesh)
        body = ask("tell me a long story " * 10, 2000, model=model)
        async with mesh.client() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(CHAT, json=body, timeout=0.7)
            parts = chunks(client, body)
            await anext(parts)
            await anext(parts)
            assert not await idle(mesh)
            await parts.aclose()
            await until(lambda: idle(mesh), 10)


@pytest.mark.parametrize("role", ["frontend", "tokenizer", "router", "prefill", "decode"])
async def test_a15_sigterm_ends_each_process_cleanly_with_its_running_requests_finished(
    state: Path, role: str
) -> None:
    two = [flag for r in ("router", "tokenizer", "prefill", "decode") for flag in (f"--{r}", "2")]
    async with cluster(state, "--engine", "sim", *two, *PACED) as mesh:
        model = await model_of(mesh)
        async with mesh.client() as client:
            body = ask("tell me a story " * 10, 60, model=model, ignore_eos=True)
            alone = (await answer(client, body))["choices"][0]["message"]["content"]
            streams = [chunks(client, body) for _ in range(8)]
            firsts = [[await anext(s), await anext(s)] for s in streams]
            for process in await mesh.of(role):
                os.kill(process["pid"], signal.SIGTERM)
                if role != "frontend":
                    break
            for first, stream in zip(firsts, streams, strict=True):
                parts = first + [part async for part in stream]
                assert text_of(parts) == alone
                assert parts[-1]["choices"][0]["finish_reason"] == "length"
            await until(lambda: gone(process["pid"]))
            if role != "frontend":
                again = await answer(client, body)
                assert again["choices"][0]["message"]["content"] == alone
        log = (state / "logs" / f"{role}-1.log").read_text() + (
            (state / "logs" / f"{role}-2.log").read_text() if role != "frontend" else ""
        )
        assert "stopped" in log
        assert "Traceback" not in log


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


async def test_with_consul_a_killed_worker_leaves_routing_and_a_new_one_joins(
    state: Path,
) -> None:
    async with ConsulAgent() as agent:
        flags = ("--discovery", "consul", "--consul-addr", agent.address, "--decode", "2")
        async with cluster(state, "--engine", "sim", *flags) as mesh:
            model = await model_of(mesh)
            async with (
                mesh.client() as client,
                httpx.AsyncClient(base_url=f"http://{agent.address}", trust_env=False) as consul,
            ):
                health = (await consul.get("/v1/health/state/passing")).json()
                services = {(c["ServiceName"], c["ServiceID"]) for c in health if c["ServiceID"]}
                roles = Counter(name for name, _ in services)
                assert {f"kvmesh-{r}" for r in ("frontend", "tokenizer", "router", "prefill")} <= (
                    set(roles)
                )
                assert roles["kvmesh-decode"] == 2
                victim, survivor = await mesh.of("decode")
                os.kill(victim["pid"], signal.SIGKILL)
                for n in range(20):
                    await answer(client, ask(f"after the kill {n}", model=model))

                async def left() -> bool:
                    ready = [w for w in await mesh.of("decode") if w["state"] == "ready"]
                    return [w["pid"] for w in ready] == [survivor["pid"]]

                await until(left, 20)
                newcomer = await mesh.start(
                    "decode",
                    discovery_kind="consul",
                    discovery_consul_address=agent.address,
                    model_path=json.loads((state / "cluster.json").read_text())["model_path"],
                    engine_name="sim",
                )

                async def used() -> bool:
                    await asyncio.gather(
                        *(answer(client, ask(f"spread {n}", model=model)) for n in range(8))
                    )
                    found = [w for w in await mesh.of("decode") if w["pid"] == newcomer.pid]
                    served = [(await mesh.metrics(w))["kvmesh_taken_total"] for w in found]
                    return sum(served) > 0

                await until(used, 60)
