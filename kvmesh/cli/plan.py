"""Which processes a local cluster consists of, and what each is told. Nothing is started here."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvmesh.cli.console import CommandError
from kvmesh.cli.settings import Override
from kvmesh.models import ModelInfo
from kvmesh.types import Role

HOST = "127.0.0.1"


class Engine(StrEnum):
    """What computes the tokens."""

    SIM = "sim"
    TORCH = "torch"
    VLLM = "vllm"


def default_engine() -> Engine:
    """Return the engine that suits this machine: vLLM on NVIDIA GPUs, else the light one.

    The tool alone says nothing: it comes with drivers and images where no GPU is.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Engine.TORCH
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return Engine.TORCH
    return Engine.VLLM if listed.returncode == 0 else Engine.TORCH


class DiscoveryChoice(StrEnum):
    """How the processes of a local cluster find each other."""

    LOCAL = "local"
    CONSUL = "consul"


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes of each role, and the frontends' first ports."""

    counts: Mapping[Role, int]
    http_port: int
    grpc_port: int

    def http(self) -> tuple[str, ...]:
        """Return the URL of each frontend."""
        return tuple(f"http://{HOST}:{port}" for port in self._ports(self.http_port))

    def grpc(self) -> tuple[str, ...]:
        """Return the gRPC address of each frontend."""
        return tuple(f"{HOST}:{port}" for port in self._ports(self.grpc_port))

    def check_ports(self) -> None:
        """Raise CommandError if a frontend can't have its ports."""
        http, grpc = self._ports(self.http_port), self._ports(self.grpc_port)
        if not set(http).isdisjoint(grpc):
            raise CommandError("the frontends' HTTP and gRPC ports overlap: move --grpc-port")
        for option, ports in (("--http-port", http), ("--grpc-port", grpc)):
            for port in ports:
                _check_free(port, option)

    def _ports(self, first: int) -> range:
        last = first + self.counts[Role.FRONTEND] - 1
        if last > 65535:
            raise CommandError(f"there is no port {last}: start lower")
        return range(first, last + 1)


@dataclass(frozen=True, slots=True)
class Served:
    """The model that all serve."""

    folder: Path
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Planned:
    """A process to start. `settings` are those that this command decides."""

    name: str
    role: Role
    settings: dict[str, object] = field(default_factory=dict)


def plan(
    layout: Layout,
    engine: Engine,
    model: Served,
    discovery: Mapping[str, str],
    overrides: Sequence[Override],
) -> list[Planned]:
    """Return the processes in the order they are started: the slow ones first.

    What is overridden is left to the override.
    """
    common = {f"discovery.{key}": value for key, value in discovery.items()}
    served = {"model.path": model.folder, "model.name": model.info.name}
    worker = {**served, "engine.name": engine.value, **_engine_settings(engine, layout)}
    of_role: dict[Role, dict[str, object]] = {
        Role.PREFILL: worker,
        Role.DECODE: worker,
        Role.TOKENIZER: {**served},
        Role.ROUTER: {},
        Role.FRONTEND: {},
    }
    planned = []
    for role, own in of_role.items():
        taken = {item.key for item in overrides if item.role in {None, role}}
        for number in range(1, layout.counts[role] + 1):
            settings = {**common, **own, **_ports_of(role, number, layout)}
            left = {key: value for key, value in settings.items() if key not in taken}
            planned.append(Planned(f"{role}-{number}", role, left))
    return planned


def roles_of(planned: Sequence[Planned]) -> Iterator[Planned]:
    """Yield one process of each role."""
    yield from {item.role: item for item in planned}.values()


def _engine_settings(engine: Engine, layout: Layout) -> dict[str, object]:
    """Share this machine's cores out: engines that each take all of them stand in line."""
    if engine is Engine.SIM:
        return {}
    workers = layout.counts[Role.PREFILL] + layout.counts[Role.DECODE]
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    return {f"engine.{engine}.threads": threads}


def _ports_of(role: Role, number: int, layout: Layout) -> dict[str, object]:
    """Fix the frontend's ports; the others take free ones, whatever the environment says."""
    if role is not Role.FRONTEND:
        return {"rpc.port": 0}
    return {
        "rpc.port": layout.grpc_port + number - 1,
        "http.port": layout.http_port + number - 1,
    }


def _check_free(port: int, option: str) -> None:
    with socket.socket() as probe:
        # As servers do: a port whose last connections are closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise CommandError(
                f"port {port} can't be used ({error.strerror}): give another {option}"
            ) from None
