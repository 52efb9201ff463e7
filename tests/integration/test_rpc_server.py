"""What every process serves beside its own services, and how failures of RPCs read."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.server import serve
from kvmesh.rpc.status import from_rpc_error
from kvmesh.v1 import worker_pb2, worker_pb2_grpc

SERVICE = "kvmesh.v1.WorkerService"
STATUS = health_pb2.HealthCheckResponse


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Fails as its ticket id says."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def ReleaseKv(self, request: Any, context: Any) -> Any:
        match request.ticket_id:
            case "invalid":
                raise InvalidRequestError("no such ticket", field="ticket_id")
            case "bug":
                raise ValueError("a secret")
            case "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.stopped.set()
        return worker_pb2.ReleaseKvResponse(released=True)

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.WatchEventsResponse(sequence=1)
        raise UnavailableError("the engine is gone")


def serving(worker: Worker, port: int = 0) -> Any:
    register = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker)
    return serve(RpcConfig(port=port), {SERVICE: register})


async def release(channel: Any, ticket_id: str, timeout: float = 10) -> Any:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return await stub.ReleaseKv(worker_pb2.ReleaseKvRequest(ticket_id=ticket_id), timeout=timeout)


async def test_health_watch_streams_every_change() -> None:
    async with (
        serving(Worker()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert (await watch.read()).status == STATUS.NOT_SERVING
            await server.set_serving(True)
            assert (await watch.read()).status == STATUS.SERVING
            await server.set_serving(False)
            assert (await watch.read()).status == STATUS.NOT_SERVING
            watch.cancel()


@pytest.mark.parametrize("name", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
async def test_reflection_lists_the_services_under_both_names(name: str) -> None:
    async with (
        serving(Worker()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        call = channel.stream_stream(
            f"/{name}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        listed = [s.name for s in (await call.read()).list_services_response.service]
        assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= set(
            listed
        )
        assert reflection_pb2_grpc.ServerReflectionStub


async def test_errors_of_unary_calls_name_the_field_and_hide_bugs() -> None:
    async with (
        serving(Worker()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        assert (await release(channel, "fine")).released
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await release(channel, "invalid")
        error = from_rpc_error(caught.value)
        assert (type(error), error.field) == (InvalidRequestError, "ticket_id")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await release(channel, "bug")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")


@pytest.mark.parametrize(
    "method",
    [
        f"{SERVICE}/ReleaseKv",
        f"{SERVICE}/WatchEvents",
        "grpc.health.v1.Health/Check",
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_bytes_that_are_no_message_are_a_bad_request(method: str) -> None:
    async with (
        serving(Worker()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        call = channel.stream_stream(f"/{method}")(iter([b"\xff\xff"]), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert type(from_rpc_error(caught.value)) is InvalidRequestError


async def test_a_deadline_while_an_error_is_told_does_not_tell_it_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serving(Worker()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        for _ in range(100):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await release(channel, "invalid", timeout=0.001)
            assert caught.value.code() in {
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            }
        assert (await release(channel, "fine")).released
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_failed_stream_ends_with_its_status_after_what_it_sent() -> None:
    async with (
        serving(Worker()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.WatchEvents(worker_pb2.WatchEventsRequest(), timeout=10)
        assert (await call.read()).sequence == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_deadline_of_a_call_stops_its_work() -> None:
    worker = Worker()
    async with (
        serving(worker) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await release(channel, "hang", timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(10):
            await worker.stopped.wait()


async def test_a_taken_port_is_a_clear_error() -> None:
    async with serving(Worker()) as server:
        with pytest.raises(UnavailableError, match=str(server.port)):
            async with serving(Worker(), server.port):
                pass


async def test_a_gate_counts_and_closes() -> None:
    gate = Gate()
    gate.enter()
    gate.close()
    with pytest.raises(UnavailableError):
        gate.enter()
    waiting = asyncio.create_task(gate.idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.leave()
    await waiting
