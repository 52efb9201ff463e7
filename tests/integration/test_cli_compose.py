"""Every command and environment of the compose file, run directly, with a real Consul."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmesh.config import environment
from kvmesh.testing.compose import load_compose, read_env_file
from kvmesh.testing.consul import ConsulAgent, free_ports
from kvmesh.types import Role

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HEALTHY_SECONDS = 120
STOP_SECONDS = 60

SIMULATED = {"ENGINE": "sim", "EXTRA": "", "MODEL": "tiny"}
ENTRYPOINT = re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Container:
    """A service of the file, as a process of this machine."""

    name: str
    command: list[str]
    health: list[str]
    environ: dict[str, str]
    log: Path

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as output:
            return subprocess.Popen(
                self.command, env=self.environ, stdout=output, stderr=output, cwd=ROOT
            )

    async def ask_health(self) -> tuple[int, str]:
        asking = await asyncio.create_subprocess_exec(
            *self.health,
            env=self.environ,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asking.communicate()
        return asking.returncode or 0, output.decode()


class Translation:
    """Turns what is written for containers into what runs on one machine."""

    def __init__(self, consul: str, models: Path, logs: Path) -> None:
        self._replaced = {"consul:8500": consul, "/models": str(models)}
        self._logs = logs

    def container(self, name: str, service: Mapping[str, Any]) -> Container:
        rpc, http, metrics = map(str, free_ports(3))
        environ = {key: self._text(value) for key, value in service["environment"].items()}
        environ |= {
            "KVMESH_RPC_PORT": rpc,
            "KVMESH_TELEMETRY_METRICS_PORT": metrics,
            "KVMESH_RPC_ADVERTISE": "127.0.0.1",
        }
        if "KVMESH_HTTP_PORT" in environ:
            self._replaced[f":{environ['KVMESH_HTTP_PORT']}/"] = f":{http}/"
            environ["KVMESH_HTTP_PORT"] = http
        assert ENTRYPOINT
        entrypoint = service.get("entrypoint") or json.loads(ENTRYPOINT[1])
        assert service["healthcheck"]["test"][0] == "CMD"
        return Container(
            name,
            self.argv([*entrypoint, *service["command"]]),
            self.argv(service["healthcheck"]["test"][1:]),
            {"PATH": environment()["PATH"], "HOME": str(self._logs), **environ},
            self._logs / f"{name}.log",
        )

    def argv(self, command: list[str]) -> list[str]:
        assert command[0] == "kvmesh"
        return [sys.executable, "-m", "kvmesh.cli", *map(self._text, command[1:])]

    def _text(self, text: str) -> str:
        for there, here in self._replaced.items():
            text = text.replace(there, here)
        return text


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        started: dict[str, subprocess.Popen[bytes]] = {}
        yield started
        for process in started.values():
            stack.enter_context(process)
            stack.callback(process.kill)


async def until_healthy(container: Container, process: subprocess.Popen[bytes]) -> None:
    said = ""
    try:
        async with asyncio.timeout(HEALTHY_SECONDS):
            while process.poll() is None:
                code, said = await container.ask_health()
                if code == 0:
                    return
                await asyncio.sleep(0.2)
    except TimeoutError:
        pass
    log = container.log.read_text()
    pytest.fail(f"{container.name} is not healthy ({process.poll()}): {said}\n{log}")


async def test_each_service_gets_healthy_and_ends_on_sigterm(
    tmp_path: Path, processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    environ = read_env_file(DEPLOY / ".env.example") | SIMULATED
    services = load_compose(DEPLOY / "docker-compose.yml", environ=environ)["services"]
    async with ConsulAgent() as consul:
        translation = Translation(consul.address, tmp_path / "models", tmp_path)
        model = services["model"]
        fetch = translation.argv([*model["entrypoint"], *model["command"]])
        assert await asyncio.to_thread(subprocess.call, fetch, cwd=ROOT) == 0

        containers = {role: translation.container(role, services[role]) for role in Role}
        for role, container in containers.items():
            processes[role] = container.start()
        for role, container in containers.items():
            await until_healthy(container, processes[role])

        for role in Role:  # in the order in which they drain
            processes[role].send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(processes[role].wait, STOP_SECONDS)
            assert code == 0, containers[role].log.read_text()
        for container in containers.values():
            code, said = await container.ask_health()
            assert code == 1, said
