"""The life of one process: start, serve, and a drain in order.

    configure -> engine -> telemetry -> discovery -> the role's own app
      -> gRPC server -> register -> ready ... signal
      -> leave routing -> NOT_SERVING -> refuse new -> let running end -> close all

A second signal ends it at once. Nothing else installs signal handlers.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import uvloop

from kvmesh.clock import Clock, SystemClock
from kvmesh.config import environment, load_or_exit
from kvmesh.discovery import DiscoveryConfig, create
from kvmesh.discovery.base import Discovery, Registration
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.config import RpcConfig, reachable
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.server import MeshServer, Register, serve
from kvmesh.rpc.serving import Identity
from kvmesh.telemetry import Meter, Telemetry, TelemetryConfig, log_to, telemetry
from kvmesh.types import Member, Role, State

log = logging.getLogger(__name__)

SECTIONS = (
    *("rpc", "discovery", "telemetry", "model", "engine"),
    *("http", "limits", "tokenizer", "routing", "queue", "watch"),
    *("decisions", "tuning"),
)
"""All sections of all roles: one file may configure a whole mesh."""

EXIT_FAILED = 1
EXIT_AT_ONCE = 130


class Config(Protocol):
    """What every role's configuration has."""

    @property
    def rpc(self) -> RpcConfig:
        """How to listen and to call."""
        ...

    @property
    def discovery(self) -> DiscoveryConfig:
        """How to find the others."""
        ...

    @property
    def telemetry(self) -> TelemetryConfig:
        """How to be seen."""
        ...


ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True, slots=True)
class Life:
    """One start of one process: what is settled before anything of it runs."""

    id: str
    role: Role
    epoch: str
    clock: Clock
    rng: random.Random


@dataclass(frozen=True, slots=True)
class Process(Life):
    """What a role's app gets: who it is, and what it shares with the rest."""

    telemetry: Telemetry
    discovery: Discovery
    gate: Gate
    environ: Mapping[str, str]

    @property
    def identity(self) -> Identity:
        """Who this process says it is on its streams."""
        return Identity(self.id, self.epoch)


async def never() -> None:
    """Wait for ever: the `failed` of a process that has nothing in it to fail."""
    await asyncio.Event().wait()


async def at_once() -> None:
    """Return: the `settled` of a process that holds nothing beyond its requests."""


@dataclass(frozen=True, slots=True)
class Service:
    """What a role's app yields once it can serve.

    `registrations`: gRPC service full name -> registration. `details`: fields of the
    registry entry that the app knows (model, engine, block_size, ...). `failed` raises when
    the process can serve no more, for example because its engine died. `settled` waits
    until nothing is held for others any more, for example KV under tickets; a drain waits
    for it after the last request.
    """

    registrations: Mapping[str, Register]
    details: Mapping[str, Any] = field(default_factory=dict)
    failed: Callable[[], Coroutine[Any, Any, None]] = never
    settled: Callable[[], Coroutine[Any, Any, None]] = at_once


App = Callable[[ConfigT, Process], AbstractAsyncContextManager[Service]]

Prepare = Callable[[ConfigT, Life], AbstractAsyncContextManager[object]]
"""What has to run before telemetry and gRPC do, because it may fork: an engine."""


@contextlib.asynccontextmanager
async def nothing(_config: object, _life: Life) -> AsyncIterator[None]:
    """Prepare nothing."""
    yield


def main(
    role: Role,
    config_type: type[ConfigT],
    app: App[ConfigT],
    prepare: Prepare[ConfigT] = nothing,
) -> int:
    """Run a role's process to its end; returns its exit code."""
    config = load_or_exit(
        config_type,
        prog=f"kvmesh serve {role}",
        description=f"One {role} process of a kvmesh.",
        foreign=SECTIONS,
    )
    seen = config.telemetry
    epoch, clock, rng = uuid.uuid4().hex, SystemClock(), random.Random()
    life = Life(_member_id(role, config.rpc, epoch), role, epoch, clock, rng)
    try:
        with log_to(
            sys.stderr,
            role=role,
            level=seen.log_level,
            json_lines=seen.log_json,
            messages=seen.log_messages,
        ):
            return uvloop.run(_run(config, life, app, prepare))
    except MeshError as error:
        print(f"kvmesh {role}: {error.message}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED


async def _run(config: ConfigT, life: Life, app: App[ConfigT], prepare: Prepare[ConfigT]) -> int:
    stop = _Stop()
    async with AsyncExitStack() as stack:
        with stop.may_interrupt():
            await stack.enter_async_context(prepare(config, life))
            process = await _process(config, life, stack)
            service = await stack.enter_async_context(app(config, process))
            server = await stack.enter_async_context(serve(config.rpc, service.registrations))
        if stop.asked.is_set():
            return 0
        return await _serve(config.rpc, process, service, server, stop.asked)


async def _process(config: ConfigT, life: Life, stack: AsyncExitStack) -> Process:
    environ, gate = environment(), Gate()
    seen = await stack.enter_async_context(
        telemetry(config.telemetry, life.role, life.epoch, environ)
    )
    show_gate(seen.meter, life.role, gate)
    found = await stack.enter_async_context(create(config.discovery, life.clock, life.rng))
    return Process(life.id, life.role, life.epoch, life.clock, life.rng, seen, found, gate, environ)


def show_gate(meter: Meter, role: Role, gate: Gate) -> None:
    """Show what passes through a process's gate."""
    meter.counter_from(
        "kvmesh_taken", "Requests taken in.", lambda: {(role,): gate.entered}, labels=("role",)
    )
    meter.gauge(
        "kvmesh_running", "Requests running now.", lambda: {(role,): gate.running}, labels=("role",)
    )


async def _serve(
    rpc: RpcConfig, process: Process, service: Service, server: MeshServer, stop: asyncio.Event
) -> int:
    member = Member(
        id=process.id,
        role=process.role,
        epoch=process.epoch,
        address=f"{rpc.reachable_host}:{server.port}",
        metrics_address=_metrics_address(rpc, process.telemetry),
        pid=os.getpid(),
        **service.details,
    )
    async with process.discovery.register(member) as registration:
        await server.set_serving(True)
        await _say(registration, State.READY)
        log.info("ready: %s serves on %s", member.id, member.address)
        failure = await _failure(stop, service.failed)
        log.info("draining: %s", failure or "asked to stop")
        await _say(registration, State.DRAINING)
        seconds = 0.0 if failure else rpc.drain_seconds
        finished = await server.drain(process.gate, service.settled, seconds)
    log.info("stopped")
    return 0 if finished and failure is None else EXIT_FAILED


async def _say(registration: Registration, state: State) -> None:
    """Publish a state. While the registry is away its renewal goes on trying."""
    try:
        await registration.set_state(state)
    except UnavailableError as error:
        log.warning("the registry does not know yet that this is %s: %s", state, error)


def _metrics_address(rpc: RpcConfig, seen: Telemetry) -> str:
    host, colon, port = seen.metrics_address.rpartition(":")
    return f"{reachable(host, rpc.advertise)}{colon}{port}" if colon else ""


def _member_id(role: Role, rpc: RpcConfig, epoch: str) -> str:
    """Return an id that a restart on the same port keeps; a free port has no past."""
    place = f"{rpc.reachable_host}-{rpc.port}" if rpc.port else epoch[:8]
    return f"{role}-{place}"


class _Stop:
    """What the first SIGTERM or SIGINT asks for; the second one exits at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._starting: asyncio.Task[object] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    @contextlib.contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Leave the block early when asked to stop; `asked` is set then."""
        self._starting = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self.asked.is_set() or self._starting is None:
                raise
            self._starting.uncancel()
        finally:
            self._starting = None

    def _signalled(self) -> None:
        if self.asked.is_set():
            os._exit(EXIT_AT_ONCE)
        self.asked.set()
        if self._starting is not None:
            self._starting.cancel()


async def _failure(
    stop: asyncio.Event, failed: Callable[[], Coroutine[Any, Any, None]]
) -> BaseException | None:
    """Wait for the stop, or for `failed`; return what failed."""
    stopped, failing = asyncio.create_task(stop.wait()), asyncio.create_task(failed())
    await asyncio.wait({stopped, failing}, return_when="FIRST_COMPLETED")
    error = failing.exception() if failing.done() else None
    for task in (stopped, failing):
        task.cancel()
    await asyncio.gather(stopped, failing, return_exceptions=True)
    return error
