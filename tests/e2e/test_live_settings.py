"""Settings of routers changed while requests flow, in a real cluster: nothing is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvmesh.testing.cluster import Cluster, cluster, run, until
from kvmesh.testing.consul import ConsulAgent

CALLERS = 4


class Mesh:
    """A cluster with two routers, and callers who never stop."""

    def __init__(
        self, running: Cluster, model: str, routers: Sequence[str], agent: ConsulAgent | None
    ) -> None:
        self.statuses: list[int] = []
        self.model = model
        self._routers = routers
        self._running = running
        self._agent = agent

    async def call_for_ever(self) -> None:
        async with self._running.client() as client:
            body = {"model": self.model, "prompt": "hello", "max_tokens": 4}
            while True:
                response = await client.post("/v1/completions", json=body)
                self.statuses.append(response.status_code)

    async def config(self, *options: str, check: bool = True) -> str:
        state = str(self._running.state)
        return await run("router", "config", *options, "--state-dir", state, check=check)

    async def put(self, wrong: str) -> None:
        """Write a document by hand, past the command's checks."""
        if self._agent is None:
            path = self._running.state / "members" / "routing.toml"
            await asyncio.to_thread(path.write_text, wrong)
            return
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://{self._agent.address}/v1/kv/kvmesh/routing"
            assert (await client.put(url, content=wrong)).json() is True

    async def counts(self, name: str, label: str = "") -> list[float]:
        """Return a figure of each router."""
        found = []
        async with httpx.AsyncClient(trust_env=False) as client:
            for address in self._routers:
                lines = (await client.get(f"http://{address}/metrics", timeout=10)).text.split("\n")
                values = [
                    float(line.rpartition(" ")[2])
                    for line in lines
                    if line.startswith(f"kvmesh_router_{name}") and label in line
                ]
                found.append(sum(values))
        return found

    async def every(self, name: str, wanted: Callable[[float], bool], label: str = "") -> None:
        """Wait until a figure of every router is as wanted."""

        async def reached() -> bool:
            return all(map(wanted, await self.counts(name, label)))

        await until(reached, 60)

    async def picks_by(self, policy: str) -> None:
        """Wait until decisions of a policy are added to those that are made already."""
        label = f'policy="{policy}"'
        before = sum(await self.counts("decisions_total", label))

        async def more() -> bool:
            return sum(await self.counts("decisions_total", label)) > before

        await until(more, 60)


@pytest.fixture(params=["local", "consul"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    flags = ["--engine", "sim", "--decode", "2", "--prefill", "0", "--router", "2"]
    agent = None
    async with AsyncExitStack() as stack:
        if request.param == "consul":
            agent = await stack.enter_async_context(ConsulAgent())
            flags += ["--discovery", "consul", "--consul-addr", agent.address]
        running = await stack.enter_async_context(cluster(tmp_path / "state", *flags))
        processes = await running.status()
        (model,) = {each["model"] for each in processes if each["role"] == "decode"}
        routers = [each["metrics_address"] for each in processes if each["role"] == "router"]
        mesh = Mesh(running, model, routers, agent)
        await stack.enter_async_context(callers(mesh))
        yield mesh


@asynccontextmanager
async def callers(mesh: Mesh) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(mesh.call_for_ever()) for _ in range(CALLERS)]
    try:
        yield
        for task in tasks:
            assert not task.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_policy_is_changed_for_one_model_and_back_while_requests_flow(mesh: Mesh) -> None:
    await mesh.picks_by("kv")
    await mesh.config("--set", f"routing.policy_by_model={mesh.model}=random")
    await mesh.every("config_version", lambda version: version == 1)
    await mesh.picks_by("random")

    refused = await mesh.config("--set", "routing.policy=nonsense", check=False)
    assert refused == ""
    assert f'policy_by_model = ["{mesh.model}=random"]' in await mesh.config("--show")

    await mesh.put("[routing]\npolicy = 'nonsense'\n[queue]\nmax_requests = 0\n")
    await mesh.every("config_rejected_total", lambda rejected: rejected == 1)
    await mesh.picks_by("random")
    assert await mesh.counts("config_version") == [1, 1]

    await mesh.config("--clear")
    await mesh.every("config_version", lambda version: version == 2)
    await mesh.picks_by("kv")
    assert (await mesh.config()) == ""
    assert set(mesh.statuses) == {200}
