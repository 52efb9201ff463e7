"""The smaller commands, against real servers and a real Consul."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.config import environment
from kvmesh.discovery import DiscoveryConfig, DiscoveryKind, create
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.server import serve
from kvmesh.testing.consul import ConsulAgent
from kvmesh.types import Member, Role, State

ROOT = Path(__file__).parents[2]
SECONDS = 60


async def kvmesh(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "kvmesh.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment() | variables,
        cwd=ROOT,
        check=False,
    )


async def test_health_follows_the_process() -> None:
    async with serve(RpcConfig(), {}) as server:
        address = f"127.0.0.1:{server.port}"
        found = await kvmesh("health", address)
        assert (found.returncode, found.stdout) == (1, "")
        assert "NOT_SERVING" in found.stderr
        await server.set_serving(True)
        found = await kvmesh("health", address)
        assert (found.returncode, found.stdout.strip()) == (0, "SERVING")
        found = await kvmesh("health", KVMESH_RPC_PORT=str(server.port))
        assert found.returncode == 0, found.stderr
        found = await kvmesh("health", address, "--service", "nobody.Knows")
        assert found.returncode == 1
    found = await kvmesh("health", address)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr


async def test_health_of_an_http_address() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status = "200 OK" if b"/good" in await reader.readline() else "503 Service Unavailable"
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await kvmesh("health", f"http://127.0.0.1:{port}/good")).returncode == 0
        bad = await kvmesh("health", f"http://127.0.0.1:{port}/bad")
        assert bad.returncode == 1
        assert "HTTP status 503" in bad.stderr


async def test_serve_becomes_the_service_and_passes_every_flag() -> None:
    shown = await kvmesh("serve", "router", "--rpc-port", "7123", "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert tomllib.loads(shown.stdout)["rpc"]["port"] == 7123
    shown = await kvmesh("serve", "router", "--help")
    assert "--rpc-port" in shown.stdout
    assert (await kvmesh("serve", "router", "--no-such-flag")).returncode == 2


async def test_served_process_gets_the_signals_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvmesh.cli", "serve", "router"]
    log = tmp_path / "log"
    directory = f"--discovery-directory={tmp_path / 'members'}"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - as a container's runtime does
            [*command, directory], stdout=output, stderr=output, cwd=ROOT
        )
    try:
        async with asyncio.timeout(SECONDS):
            while "ready: router-" not in log.read_text():
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, SECONDS) == 0
    finally:
        process.kill()
        process.wait()


async def test_status_reads_any_consul(tmp_path: Path) -> None:
    member = Member("decode-h-1", Role.DECODE, "e1", "127.0.0.1:1", model="m", pid=1 << 22)
    nothing = ["--state-dir", str(tmp_path), "--discovery", "consul", "--consul-addr"]
    async with ConsulAgent() as agent:
        config = DiscoveryConfig(kind=DiscoveryKind.CONSUL, consul_address=agent.address)
        found = await kvmesh("status", *nothing, agent.address, "--json")
        assert found.returncode == 1
        assert json.loads(found.stdout)["processes"] == []
        async with (
            create(config, SystemClock(), random.Random(1)) as discovery,
            discovery.register(member) as registration,
        ):
            await registration.set_state(State.READY)
            found = await kvmesh("status", *nothing, agent.address, "--json")
    assert found.returncode == 0, found.stderr
    [shown] = json.loads(found.stdout)["processes"]
    assert (shown["id"], shown["epoch"], shown["state"]) == ("decode-h-1", "e1", "ready")
    assert shown["load"] is None  # nobody answers at its address
    gone = await kvmesh("status", *nothing, agent.address)
    assert gone.returncode == 1
    assert gone.stderr == f"Error: the registry does not answer: Consul at {agent.address}\n"


@pytest.mark.parametrize("arguments", [["chat", "hi"], ["status"], ["down"]])
async def test_without_a_cluster_people_are_told(tmp_path: Path, arguments: list[str]) -> None:
    found = await kvmesh(*arguments, "--state-dir", str(tmp_path / "none"))
    assert found.returncode == (0 if arguments == ["down"] else 1)
    assert "run" in found.stdout + found.stderr
    assert "Traceback" not in found.stderr


async def test_every_command_explains_itself() -> None:
    shown = await kvmesh("--help")
    assert shown.returncode == 0
    for name in ("up", "down", "status", "chat", "model", "router", "serve", "health", "version"):
        assert f" {name} " in shown.stdout
        assert (await kvmesh(name, "--help")).returncode == 0
    assert (await kvmesh("nonsense")).returncode == 2
