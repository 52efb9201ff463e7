"""Real processes that die, restart, or lose sight of each other while requests flow.

No request fails or gets another text than undisturbed, and prompts that were cached are
found cached again within two seconds of traffic.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.testing.cluster import Cluster, cluster, free_ports, until
from kvmesh.testing.consul import ConsulAgent
from kvmesh.testing.engine_torch import tiny_llama
from kvmesh.testing.event_gap import event_gap

pytestmark = pytest.mark.timeout(600)

CALLERS = 4
PROMPTS = 16
MAX_TOKENS = 12
TEXT = "/v1/completions"
SECONDS = 2.0
"""Traffic after which the hit rate is to be what it was."""
LOSS = 0.1
"""What it may lack then: a request or two that found a prompt cached elsewhere."""

ENGINES = ["sim", pytest.param("torch", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Served:
    """What came of one request, and when it was sent."""

    sent: float
    wrong: str
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Traffic:
    """Callers who never stop asking for the texts that they know."""

    mesh: Cluster
    model: str
    texts: dict[str, str] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)

    def body(self, prompt: str, stream: bool) -> dict[str, Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **options,
        }

    async def learn(self) -> None:
        """Ask for each text once, with nothing else going on."""
        async with self.mesh.client() as client:
            for number in range(PROMPTS):
                prompt = f"{number} " + f"word{number} " * 60
                response = await client.post(TEXT, json=self.body(prompt, False))
                assert response.status_code == 200, response.text
                self.texts[prompt] = response.json()["choices"][0]["text"]

    async def call_for_ever(self, number: int) -> None:
        rng = random.Random(number)
        async with self.mesh.client() as client:
            while True:
                prompt = rng.choice(list(self.texts))
                self.served.append(await self.ask(client, prompt, rng.random() < 0.5))

    async def ask(self, client: httpx.AsyncClient, prompt: str, stream: bool) -> Served:
        sent = now()
        async with client.stream("POST", TEXT, json=self.body(prompt, stream)) as response:
            page = (await response.aread()).decode()
        if response.status_code != 200 or '"error"' in page:
            return Served(sent, page)
        parts = [line.removeprefix("data: ") for line in page.splitlines() if line.strip()]
        if stream and parts.pop() != "[DONE]":
            return Served(sent, f"no end: {page}")
        documents = [json.loads(part) for part in parts]
        text = "".join(choice["text"] for d in documents for choice in d["choices"])
        if text != self.texts[prompt]:
            return Served(sent, f"{text!r} instead of {self.texts[prompt]!r}")
        usage = documents[-1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Served(sent, "", usage["prompt_tokens"], cached)

    async def rate(self, seconds: float = SECONDS) -> float:
        """Return the share of prompt tokens that are found cached from now on."""
        began = now()
        await asyncio.sleep(seconds)  # traffic is what is waited for
        answers = [each for each in self.served if each.sent >= began and not each.wrong]
        assert len(answers) >= 10, f"{len(answers)} answers in {seconds} s"
        return sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)

    def check(self) -> None:
        """Raise if any request failed, or had another text."""
        wrong = [each.wrong for each in self.served if each.wrong]
        assert not wrong, f"{len(wrong)} of {len(self.served)}: {wrong[:3]}"


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def traffic(mesh: Cluster) -> AsyncIterator[Traffic]:
    """Yield traffic that flows; at the end, all of it must have been served well."""
    async with mesh.client() as client:
        model = str((await client.get("/v1/models")).json()["data"][0]["id"])
    running = Traffic(mesh, model)
    await running.learn()
    async with asyncio.TaskGroup() as group:
        callers = [group.create_task(running.call_for_ever(n)) for n in range(CALLERS)]
        try:
            yield running
        finally:
            for caller in callers:
                caller.cancel()
    running.check()


async def disturbed(mesh: Cluster, disturb: Callable[[Traffic], Awaitable[None]]) -> None:
    """Disturb the traffic; see that the hit rate is back after it."""
    async with traffic(mesh) as flowing:
        await flowing.rate()
        before = await flowing.rate()
        assert before > 0.5
        await disturb(flowing)
        after = await flowing.rate()
        assert after >= before - LOSS, f"{after:.2f} cached, {before:.2f} before"


@asynccontextmanager
async def started(
    tmp_path: Path, engine: str, *flags: str, **counts: int
) -> AsyncIterator[Cluster]:
    """Yield a cluster on an engine; `counts` of each role."""
    wanted = {"router": 2, "prefill": 1, "decode": 2} | counts
    options = [part for role, count in wanted.items() for part in (f"--{role}", str(count))]
    if engine == "torch":
        folder = await asyncio.to_thread(tiny_llama, tmp_path / "tiny")
        options += ["--model", str(folder)]
    async with cluster(tmp_path / "state", "--engine", engine, *options, *flags) as mesh:
        yield mesh


def settings(mesh: Cluster, engine: str, role: str, **more: str) -> dict[str, str]:
    """What one more process of a role is to be told."""
    described = json.loads((mesh.state / "cluster.json").read_text())
    found = {"discovery_kind": "local", "discovery_directory": str(mesh.state / "members")}
    if role != "router":
        found |= {"model_path": described["model_path"], "engine_name": engine}
        found |= {"engine_torch_threads": "1"} if engine == "torch" else {}
    return {**found, **more}


async def ready(mesh: Cluster, role: str, count: int) -> bool:
    return sum(each["state"] == "ready" for each in await mesh.of(role)) == count


async def settle(mesh: Cluster, workers: int) -> None:
    """Wait until every router that is there gives requests to so many workers."""
    routers = [each for each in await mesh.of("router") if each["state"] == "ready"]

    async def settled() -> bool:
        counts = [await shown(r, "kvmesh_router_workers", 'routable="yes"') for r in routers]
        return bool(counts) and set(counts) == {workers}

    await until(settled, 120)


async def shown(process: dict[str, Any], name: str, label: str = "") -> float:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        url = f"http://{process['metrics_address']}/metrics"
        page = (await client.get(url, timeout=10)).text.splitlines()
    rows = [line for line in page if line.startswith((f"{name}{{", f"{name} ")) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in rows)


@pytest.mark.parametrize("engine", ENGINES)
async def test_routers_that_are_killed_lose_no_request(tmp_path: Path, engine: str) -> None:
    async with started(tmp_path, engine) as mesh:

        async def kill_both(flowing: Traffic) -> None:
            first, second = await mesh.of("router")
            os.kill(first["pid"], signal.SIGKILL)
            await flowing.rate()
            os.kill(second["pid"], signal.SIGKILL)
            # Now frontends choose by themselves.
            await flowing.rate()
            (frontend,) = await mesh.of("frontend")
            assert await shown(frontend, "kvmesh_fallbacks_total") > 0
            await mesh.start("router", **settings(mesh, engine, "router"))
            await until(lambda: ready(mesh, "router", 1))
            await settle(mesh, 3)

        await disturbed(mesh, kill_both)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_restarts_on_its_address_loses_no_request(
    tmp_path: Path, engine: str, role: str
) -> None:
    async with started(tmp_path, engine) as mesh:
        (port,) = free_ports(1)
        told = settings(mesh, engine, role, rpc_port=str(port))
        process = await mesh.start(role, **told)
        await settle(mesh, 4)

        async def restart(flowing: Traffic) -> None:
            nonlocal process
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            process = await mesh.start(role, **told)
            await settle(mesh, 4)

        await disturbed(mesh, restart)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_is_killed_and_is_back_on_its_address_loses_no_request(
    tmp_path: Path, engine: str, role: str
) -> None:
    async with started(tmp_path, engine) as mesh:
        (port,) = free_ports(1)
        told = settings(mesh, engine, role, rpc_port=str(port))
        process = await mesh.start(role, **told)
        await settle(mesh, 4)

        async def kill(flowing: Traffic) -> None:
            nonlocal process
            process.kill()
            await process.wait()
            await flowing.rate()
            process = await mesh.start(role, **told)
            await settle(mesh, 4)

        await disturbed(mesh, kill)


@pytest.mark.parametrize("engine", ENGINES)
async def test_events_that_are_lost_are_noticed_and_asked_for_again(
    tmp_path: Path, engine: str
) -> None:
    async with started(tmp_path, engine, decode=1) as mesh, AsyncExitStack() as stack:
        (port,) = free_ports(1)
        # Another address of the same machine, on which only the proxy listens.
        gap = await stack.enter_async_context(event_gap(f"127.0.0.2:{port}", f"127.0.0.1:{port}"))
        await mesh.start(
            "decode",
            **settings(mesh, engine, "decode", rpc_port=str(port), rpc_advertise="127.0.0.2"),
        )
        await settle(mesh, 3)

        async def lose(_: Traffic) -> None:
            for count in (1, 5):
                before = gap.watched
                gap.to_lose = count
                # Both routers notice that they have missed something, and ask again.
                await until(lambda b=before: gap.watched > b)  # type: ignore[misc]
                assert gap.lost

        await disturbed(mesh, lose)


OUTAGES = [
    ("sim", 6.0, False),
    ("sim", 6.0, True),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("sim", 60.0, True),
            ("torch", 60.0, False),
        )
    ),
]


@pytest.mark.parametrize(("engine", "seconds", "frozen"), OUTAGES)
async def test_consul_that_is_away_loses_no_request(
    tmp_path: Path, engine: str, seconds: float, frozen: bool
) -> None:
    """Killed, it comes back with empty state; frozen, it takes calls and answers none."""
    async with ConsulAgent() as agent:
        flags = ("--discovery", "consul", "--consul-addr", agent.address)
        async with started(tmp_path, engine, *flags) as mesh:
            services = sorted(await agent.get("/v1/agent/services"))

            async def outage(flowing: Traffic) -> None:
                if frozen:
                    agent.signal(signal.SIGSTOP)
                else:
                    await agent.kill()
                await flowing.rate(seconds)
                if frozen:
                    agent.signal(signal.SIGCONT)
                else:
                    await agent.start()

                async def back() -> bool:
                    health = await agent.get("/v1/health/state/passing")
                    passing = {check["ServiceID"] for check in health if check["ServiceID"]}
                    return passing == set(services)

                await until(back, 60)

            await disturbed(mesh, outage)
            # What has joined since is found.
            joins = settings(
                mesh,
                engine,
                "decode",
                discovery_kind="consul",
                discovery_consul_address=agent.address,
            )
            del joins["discovery_directory"]
            await mesh.start("decode", **joins)
            await settle(mesh, 4)
