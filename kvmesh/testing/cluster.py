"""A real cluster of real processes, for end-to-end tests: `kvmesh up`, driven from outside."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvmesh.config import environment

KVMESH = str(Path(sys.executable).with_name("kvmesh"))
"""The command as it is installed beside this Python."""

START_SECONDS = 300.0
POLL_SECONDS = 0.05


@dataclass(slots=True)
class Cluster:
    """A running cluster. Every method may be called at any time of its life."""

    state: Path
    url: str
    grpc: str
    extra: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def status(self) -> list[dict[str, Any]]:
        """Return the processes as `kvmesh status --json` lists them."""
        text = await run("status", "--json", "--state-dir", str(self.state), check=False)
        processes: list[dict[str, Any]] = json.loads(text)["processes"]
        return processes

    async def of(self, role: str) -> list[dict[str, Any]]:
        """Return the processes of a role."""
        return [process for process in await self.status() if process["role"] == role]

    async def metrics(self, process: dict[str, Any]) -> dict[str, float]:
        """Return a process's metrics, labels summed up, by Prometheus name."""
        address = process["metrics_address"]
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{address}/metrics", timeout=10)).text
        sums: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    async def start(self, role: str, **settings: str) -> asyncio.subprocess.Process:
        """Start one more process, as `kvmesh serve` would be called by hand."""
        flags = [part for key, value in settings.items() for part in (_flag(key), value)]
        process = await asyncio.create_subprocess_exec(
            KVMESH, "serve", role, *flags, stdin=asyncio.subprocess.DEVNULL
        )
        self.extra.append(process)
        return process

    def client(self) -> httpx.AsyncClient:
        """Return an HTTP client of the frontend; close it."""
        return httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False)


@asynccontextmanager
async def cluster(
    state: Path, *flags: str, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Cluster]:
    """Yield a cluster that `kvmesh up --detach` has started with `flags`; stop it after.

    `environ` are variables that all its processes get.
    """
    http, grpc = free_ports(2)
    await run(
        "up",
        "--detach",
        "--no-chat",
        "--state-dir",
        str(state),
        "--http-port",
        str(http),
        "--grpc-port",
        str(grpc),
        *flags,
        environ=environ,
    )
    running = Cluster(state, f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    try:
        yield running
    finally:
        for process in running.extra:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
        await run("down", "--state-dir", str(state), check=False)


async def run(*arguments: str, check: bool = True, environ: Mapping[str, str] | None = None) -> str:
    """Run the kvmesh command; return what it printed. Raises with it if it fails."""
    process = await asyncio.create_subprocess_exec(
        KVMESH,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**environment(), "COLUMNS": "200", **(environ or {})},
    )
    async with asyncio.timeout(START_SECONDS):
        out, err = await process.communicate()
    if check and process.returncode:
        raise AssertionError(f"kvmesh {arguments[0]} failed:\n{out.decode()}\n{err.decode()}")
    return out.decode()


async def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait until `what` (a function, plain or async) returns something true; return it."""
    async with asyncio.timeout(seconds):
        while True:
            got = what()
            if asyncio.iscoroutine(got):
                got = await got
            if got:
                return got
            await asyncio.sleep(POLL_SECONDS)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
