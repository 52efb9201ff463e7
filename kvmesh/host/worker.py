"""What prefill and decode processes have in common: an engine, and `WorkerService`."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from kvmesh.config import ConfigError
from kvmesh.engine.base import AsyncEngine, KvEventSource, PrefillEngine, Seat
from kvmesh.engine.factory import EngineConfig, create
from kvmesh.errors import OverloadedError
from kvmesh.host.config import ModelConfig
from kvmesh.host.desk import Running
from kvmesh.host.process import Config, Life, Process, Service, main
from kvmesh.kv.blocks import HASH_LABEL, HASH_SCHEME
from kvmesh.rpc.server import Register
from kvmesh.rpc.serving import Identity
from kvmesh.types import CacheSnapshot, KvEvent, Load, Role, WorkerEvent
from kvmesh.v1 import worker_pb2, worker_pb2_grpc
from kvmesh.wire import check_revision, event_to_proto

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.02
"""Events gather this long before they are sent: at most 50 messages a second."""

LOAD_SECONDS = 0.1
"""How often the load is looked at; a changed one is published."""

QUIET_LOOKS = 10
"""An unchanged load is repeated after so many looks: a watcher knows the worker lives."""

SETTLE_SECONDS = 0.05
"""How often a draining worker looks whether its tickets are gone."""

CHECK_SECONDS = 1.0
"""How often a worker asks its engine whether it can still serve."""

MAX_PENDING_EVENTS = 65_536
"""Events waiting for a watcher that does not read, before it is cut off."""


class WorkerConfig(Config, Protocol):
    """What the configuration of a worker's role has."""

    @property
    def model(self) -> ModelConfig:
        """The model to serve."""
        ...

    @property
    def engine(self) -> EngineConfig:
        """The engine to serve it on."""
        ...


ConfigT = TypeVar("ConfigT", bound=WorkerConfig)


WorkerApp = Callable[[Process, Running], Service]
"""Puts a worker's service together around its engine."""


def worker_main(role: Role, config_type: type[ConfigT], app: WorkerApp) -> int:
    """Run a worker's process to its end; returns its exit code. The engine starts first."""
    started: list[Running] = []

    @contextlib.asynccontextmanager
    async def prepare(config: ConfigT, life: Life) -> AsyncIterator[None]:
        async with running_engine(config, life) as running:
            started.append(running)
            yield

    @contextlib.asynccontextmanager
    async def complete(_config: ConfigT, process: Process) -> AsyncIterator[Service]:
        yield app(process, started[0])

    return main(role, config_type, complete, prepare)


@contextlib.asynccontextmanager
async def running_engine(config: WorkerConfig, life: Life) -> AsyncIterator[Running]:
    """Yield the configured engine once it is ready.

    Raises `ConfigError` without a model folder, `EngineError` when it does not load.
    """
    if config.model.path is None:
        raise ConfigError("model.path: required, set --model-path or KVMESH_MODEL_PATH")
    seat = Seat(life.id, life.epoch, life.role, config.model.path, config.model.served_name)
    engine = create(config.engine, seat, clock=life.clock, rng=life.rng)
    try:
        yield Running(engine, await engine.start())
    finally:
        await engine.aclose()


def worker_service(
    process: Process, running: Running, registrations: Mapping[str, Register]
) -> Service:
    """Return a worker's service: the role's own registrations and `WorkerService`."""
    engine = running.engine
    servicer = WorkerServicer(engine, process.identity)
    register = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
    return Service(
        {**registrations, "kvmesh.v1.WorkerService": register},
        _details(running),
        failed=partial(engine_failed, engine),
        settled=partial(tickets_settled, engine),
    )


async def engine_failed(engine: AsyncEngine) -> None:
    """Return never; raise `EngineError` once the engine can serve no more."""
    while True:
        engine.check()
        await asyncio.sleep(CHECK_SECONDS)


def _details(running: Running) -> dict[str, Any]:
    """Return the fields of a registry entry that an engine decides.

    The label `kv_events` is `no` where the engine does not tell what it has cached, and
    `block_hash` names the hashes that it tells of.
    """
    info = running.info
    labels = {HASH_LABEL: HASH_SCHEME}
    if not isinstance(running.engine, KvEventSource):
        labels["kv_events"] = "no"
    return {
        "labels": labels,
        "model": info.model,
        "engine": info.engine,
        "block_size": info.block_size,
        "total_blocks": info.total_blocks,
        "context_length": info.context_length,
        "layout_fingerprint": info.layout_fingerprint,
    }


async def tickets_settled(engine: AsyncEngine) -> None:
    """Wait until no KV is held for tickets; leases bound the wait."""
    while True:
        if not engine.load().ticket_bytes:
            return
        await asyncio.sleep(SETTLE_SECONDS)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Publishes what the engine has cached and is busy with; ends KV leases."""

    def __init__(self, engine: AsyncEngine, identity: Identity) -> None:
        self._engine = engine
        self._identity = identity

    async def ReleaseKv(
        self, request: worker_pb2.ReleaseKvRequest, context: Any
    ) -> worker_pb2.ReleaseKvResponse:
        """End a ticket's lease, if this life of this worker gave it."""
        released = False
        if request.epoch == self._identity.epoch and isinstance(self._engine, PrefillEngine):
            released = await self._engine.release(request.ticket_id)
        return worker_pb2.ReleaseKvResponse(released=released)

    async def WatchEvents(
        self, request: worker_pb2.WatchEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchEventsResponse]:
        """Stream a snapshot, then changes as they come, and the load."""
        check_revision(request.schema_revision)
        with _Subscription(self._engine) as subscription:
            sequence = 0
            while True:
                sequence += 1
                response = worker_pb2.WatchEventsResponse(
                    worker_id=self._identity.server_id,
                    epoch=self._identity.epoch,
                    sequence=sequence,
                )
                for event in await subscription.next():
                    event_to_proto(event, response.events.add())
                yield response


class _Subscription:
    """One watcher's pending events."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._pending: list[WorkerEvent] = []
        self._wake = asyncio.Event()
        self._load: Load | None = None
        self._overflow = False
        self._unsubscribe = contextlib.ExitStack()

    def __enter__(self) -> "_Subscription":
        hashes: list[int] = []
        if isinstance(self._engine, KvEventSource):
            hashes = list(self._engine.snapshot())
            self._unsubscribe.callback(self._engine.subscribe(self._add))
        self._pending.append(CacheSnapshot(hashes))
        self._wake.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._unsubscribe.close()

    async def next(self) -> list[WorkerEvent]:
        """Wait for news; return all of it. The load comes along when it has changed."""
        await asyncio.sleep(BATCH_SECONDS)
        for _ in range(QUIET_LOOKS):
            if self._pending or self._overflow or self._engine.load() != self._load:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_SECONDS):
                    await self._wake.wait()
        if self._overflow:
            raise OverloadedError("the watcher reads too slowly")
        self._wake.clear()
        events, self._pending = self._pending, []
        self._load = self._engine.load()
        return [*events, self._load]

    def _add(self, event: KvEvent) -> None:
        if len(self._pending) >= MAX_PENDING_EVENTS:
            self._overflow = True
        else:
            self._pending.append(event)
        self._wake.set()
