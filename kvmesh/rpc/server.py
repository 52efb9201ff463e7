"""The gRPC server of a process: services, health, reflection, and an ordered drain."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from kvmesh.errors import UnavailableError
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.interceptors import interceptors

log = logging.getLogger(__name__)

Register = Callable[[grpc.aio.Server], None]
"""Adds one servicer to a server, for example `partial(add_XServicer_to_server, servicer)`."""


class MeshServer:
    """A listening server. `port` is the one it listens on, whatever was asked for."""

    def __init__(self, server: grpc.aio.Server, names: Sequence[str], port: int) -> None:
        self.port = port
        self._server = server
        self._names = names
        self._health = _health_servicer()
        self._draining = False

    async def set_serving(self, serving: bool) -> None:
        """Say over `grpc.health.v1`, for each service and for `""`, whether to call."""
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, value)

    async def drain(
        self, gate: Gate, settled: Callable[[], Awaitable[None]], seconds: float
    ) -> bool:
        """NOT_SERVING, refuse new requests, let the running ones end, then close.

        `settled` is awaited after the last request. Returns whether all of it was done
        within `seconds`; what still ran is cancelled.
        """
        await self.set_serving(False)
        gate.close()
        finished = True
        try:
            async with asyncio.timeout(seconds):
                await gate.idle()
                await settled()
        except TimeoutError:
            finished = False
            log.warning("%d requests still ran after %.0f s of drain", gate.running, seconds)
        # Idle streams stay open until here; the grace lets their last words out.
        await self._server.stop(grace=0.5)
        return finished

    async def start(self) -> None:
        """Begin to listen. Everything is NOT_SERVING until `set_serving`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(False)
        await self._server.start()


@asynccontextmanager
async def serve(config: RpcConfig, services: Mapping[str, Register]) -> AsyncIterator[MeshServer]:
    """Yield a started server of `services` (full name -> registration).

    Health and reflection are added. Raises `UnavailableError` when the port is taken.
    Leaving stops it at once: call `drain` before.
    """
    server = grpc.aio.server(interceptors=interceptors(), options=config.server_options())
    for register in services.values():
        register(server)
    _add_reflection(server, [*services, health.SERVICE_NAME])
    address = f"{config.host}:{config.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise UnavailableError(f"can't listen on {address}: is the port taken?", field="rpc.port")
    running = MeshServer(server, list(services), port)
    await running.start()
    try:
        yield running
    finally:
        await server.stop(grace=0)


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Serve reflection as `v1` and as `v1alpha`, which are alike but for the name."""
    names = [*names, reflection.SERVICE_NAME, _REFLECTION_V1]
    servicer = ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods: dict[str, Any] = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, methods)
            for name in (reflection.SERVICE_NAME, _REFLECTION_V1)
        )
    )


_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

_health_servicer: Any = vars(health)["aio"].HealthServicer
"""The asyncio one, whose Watch streams changes; the published stubs don't know of it."""
