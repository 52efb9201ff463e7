"""Cases of health, on real processes: frozen and vanished workers, proxies, long absences."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.testing.cluster import Cluster, cluster, until
from kvmesh.testing.consul import ConsulAgent

pytestmark = pytest.mark.timeout(240)

TEXT = "/v1/completions"


async def model_of(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def ask(client: httpx.AsyncClient, model: str, prompt: str = "hello") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return await client.post(TEXT, json=body, timeout=30)


async def routable(mesh: Cluster) -> float:
    """Return how many workers the router gives requests to."""
    (router,) = await mesh.of("router")
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"http://{router['metrics_address']}/metrics", timeout=10)).text
    rows = [row for row in page.splitlines() if row.startswith("kvmesh_router_workers{")]
    return sum(float(row.rpartition(" ")[2]) for row in rows if 'routable="yes"' in row)


async def statuses(client: httpx.AsyncClient) -> tuple[int, int]:
    """Return what the frontend's probes say: alive, ready."""
    alive, ready = await client.get("/health"), await client.get("/ready")
    return alive.status_code, ready.status_code


async def passing(agent: ConsulAgent, role: str) -> int:
    """Return how many processes of a role Consul would call."""
    found = await agent.get(f"/v1/health/service/kvmesh-{role}?passing=true")
    return len(found)


async def test_a28_with_all_decode_workers_gone_the_frontend_lives_and_is_not_ready(
    tmp_path: Path,
) -> None:
    flags = ("--engine", "sim", "--prefill", "0", "--decode", "1")
    async with cluster(tmp_path / "state", *flags) as mesh, mesh.client() as client:
        model = await model_of(client)
        assert await statuses(client) == (200, 200)
        (decode,) = await mesh.of("decode")
        os.kill(decode["pid"], signal.SIGKILL)

        async def unready() -> bool:
            return await statuses(client) == (200, 503)

        await until(unready, 10)
        refused = await ask(client, model)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        await mesh.start("decode", **told(mesh, decode))

        async def served() -> bool:
            return await statuses(client) == (200, 200)

        await until(served, 30)
        assert (await ask(client, model)).status_code == 200


def told(mesh: Cluster, process: dict[str, Any]) -> dict[str, str]:
    """What a process like another is to be told."""
    return {
        "discovery_kind": "local",
        "discovery_directory": str(mesh.state / "members"),
        "engine_name": "sim",
        "model_path": json.loads((mesh.state / "cluster.json").read_text())["model_path"],
        "rpc_port": process["address"].rpartition(":")[2],
    }


async def test_a28_a_frozen_worker_gets_no_traffic_until_it_moves_again(tmp_path: Path) -> None:
    async with ConsulAgent() as agent:
        flags = ("--discovery", "consul", "--consul-addr", agent.address)
        flags += ("--engine", "sim", "--prefill", "0", "--decode", "2")
        async with cluster(tmp_path / "state", *flags) as mesh, mesh.client() as client:
            model = await model_of(client)

            async def both() -> bool:
                return await routable(mesh) == 2

            await until(both)
            frozen, _ = await mesh.of("decode")
            os.kill(frozen["pid"], signal.SIGSTOP)
            try:

                async def one() -> bool:
                    return await routable(mesh) == 1

                await until(one, 20)
                async with asyncio.timeout(15):
                    for number in range(20):
                        assert (await ask(client, model, f"{number}")).status_code == 200

                async def critical() -> bool:
                    return await passing(agent, "decode") == 1

                await until(critical, 30)
            finally:
                os.kill(frozen["pid"], signal.SIGCONT)
            await until(both, 30)
            assert (await ask(client, model)).status_code == 200


async def test_a53_proxies_of_the_environment_are_for_others(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    environ = {each: nowhere for name in names for each in (name, name.upper())}
    flags = ("--engine", "sim", "--prefill", "1", "--decode", "1")
    async with (
        cluster(tmp_path / "state", *flags, environ=environ) as mesh,
        mesh.client() as client,
    ):
        answer = await ask(client, await model_of(client), "word " * 100)
        assert answer.status_code == 200


async def test_a53_a_worker_that_was_away_for_long_is_used_at_once(tmp_path: Path) -> None:
    """gRPC's back-off, which grows while a peer is away, does not outlast its absence."""
    flags = ("--engine", "sim", "--prefill", "0", "--decode", "1")
    async with cluster(tmp_path / "state", *flags) as mesh, mesh.client() as client:
        model = await model_of(client)
        assert (await ask(client, model)).status_code == 200
        (decode,) = await mesh.of("decode")
        os.kill(decode["pid"], signal.SIGKILL)
        for _ in range(20):
            assert (await ask(client, model)).status_code == 503
            await asyncio.sleep(0.5)  # time that it is away
        await mesh.start("decode", **told(mesh, decode))

        async def ready() -> bool:
            return any(each["state"] == "ready" for each in await mesh.of("decode"))

        await until(ready, 60)
        async with asyncio.timeout(2):
            assert (await ask(client, model)).status_code == 200
