"""A gRPC client that knows none of our stubs: all that it calls it learns by reflection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from kvmesh.testing.cluster import Cluster, cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SECONDS = 30
INFERENCE = "kvmesh.v1.InferenceService"
HEALTH = "grpc.health.v1.Health"
PROMPT = {"text": "What is the capital of France?"}


class Client:
    """Calls what a server says that it has. Messages are written as dictionaries."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = descriptor_pool.DescriptorPool(self._database)

    def services(self) -> list[str]:
        return list(self._database.get_services())

    def call(self, service: str, method: str, /, **fields: Any) -> Any:
        """Call an rpc that takes one message; returns its response, or an iterator of them."""
        found = self._pool.FindServiceByName(service).methods_by_name[method]
        request, response = map(
            message_factory.GetMessageClass, (found.input_type, found.output_type)
        )
        kind = "unary_stream" if found.server_streaming else "unary_unary"
        rpc = getattr(self._channel, kind)(
            f"/{service}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return rpc(request(**fields), timeout=SECONDS)

    def enum(self, name: str, value: int) -> str:
        return str(self._pool.FindEnumTypeByName(name).values_by_number[value].name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    state: Path = tmp_path_factory.mktemp("mesh") / "state"
    fast = ("--set", "engine.sim.latency.speed=0")
    async with cluster(state, "--engine", "sim", *fast) as running:
        yield running


@pytest.fixture(scope="module")
def client(mesh: Cluster) -> Iterator[Client]:
    with grpc.insecure_channel(mesh.grpc) as channel:
        yield Client(channel)


@pytest.fixture(scope="module")
def model(client: Client) -> str:
    (one,) = client.call(INFERENCE, "ListModels").models
    assert one.context_length > 0
    return str(one.name)


async def test_reflection_tells_of_every_service(client: Client) -> None:
    assert {INFERENCE, HEALTH, "grpc.reflection.v1.ServerReflection"} <= set(client.services())


async def test_a_completion_is_the_same_streamed_and_not(client: Client, model: str) -> None:
    given = {**PROMPT, "sampling": {"max_tokens": 12, "temperature": 0.0, "logprobs": 1}}
    whole = client.call(INFERENCE, "Generate", model=model, input=given)
    assert whole.text
    assert whole.request_id
    reason = client.enum("kvmesh.v1.FinishReason", whole.completion.finish_reason)
    assert reason == "FINISH_REASON_LENGTH"
    assert whole.completion.usage.completion_tokens == 12
    assert b"".join(entry.token.text for entry in whole.logprobs).decode() == whole.text
    parts = list(client.call(INFERENCE, "StreamGenerate", model=model, input=given))
    assert "".join(part.text for part in parts) == whole.text
    assert [part.WhichOneof("event") for part in parts][-1] == "completion"
    assert parts[-1].completion.finish_reason == whole.completion.finish_reason
    assert [e.token for p in parts for e in p.logprobs] == [e.token for e in whole.logprobs]


async def test_a_chat_and_its_stop(client: Client, model: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    given: Any = {"chat": chat, "sampling": {"max_tokens": 12, "temperature": 0.0}}
    whole = client.call(INFERENCE, "Generate", model=model, input=given).text
    stop = whole[4:6]
    stopped = client.call(INFERENCE, "Generate", model=model, input={**given, "stop": [stop]})
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.completion.stop_string == stop


async def test_health_is_told_by_service(client: Client) -> None:
    for name in ("", INFERENCE):
        status = client.call(HEALTH, "Check", service=name).status
        assert client.enum("grpc.health.v1.HealthCheckResponse.ServingStatus", status) == "SERVING"
        watching = client.call(HEALTH, "Watch", service=name)
        assert next(watching).status == status
        watching.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        client.call(HEALTH, "Check", service="no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"model": "models/nobody", "input": PROMPT}, "NOT_FOUND", "UNKNOWN_MODEL", "model"),
        ({"input": PROMPT}, "INVALID_ARGUMENT", "INVALID_ARGUMENT", "model"),
        (
            {"input": {**PROMPT, "sampling": {"top_p": 2.0}}},
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
            "top_p",
        ),
        (
            {"input": {**PROMPT, "sampling": {"max_tokens": 10**6}}},
            "INVALID_ARGUMENT",
            "CONTEXT_LENGTH_EXCEEDED",
            "max_tokens",
        ),
    ],
)
async def test_errors_have_their_details(
    client: Client,
    model: str,
    method: str,
    fields: dict[str, Any],
    code: str,
    reason: str,
    field: str,
) -> None:
    named = fields if field == "model" else {"model": model, **fields}
    with pytest.raises(grpc.RpcError) as caught:
        list(client.call(INFERENCE, method, **named))
    assert caught.value.code().name == code
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert status.message == caught.value.details()
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "kvmesh")
    assert status.details[1].Unpack(bad)
    assert [violation.field for violation in bad.field_violations] == [field]
