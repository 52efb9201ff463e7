"""Anything at all sent to the public gRPC service: it refuses, answers, and lives on.

Everything is real but the engine, which is the simulated one; it runs in this process,
on a loop that turns while an example does.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvmesh.engine.factory import EngineConfig
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.host.config import ModelConfig
from kvmesh.rpc.config import RpcConfig
from kvmesh.testing.cluster import until
from kvmesh.testing.fuzz_inference import (
    METADATA,
    NAME,
    SECONDS,
    TIMEOUTS,
    Expected,
    anything,
    conversations,
    expected,
    good,
    opening,
)
from kvmesh.testing.fuzz_proto import broken
from kvmesh.testing.fuzzing import Fuzz
from kvmesh.testing.mesh import Mesh, Node, mesh, worker
from kvmesh.testing.tokenizer_folders import byte_level_folder
from kvmesh.types import Role
from kvmesh.v1 import inference_pb2, inference_pb2_grpc
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.frontend.app import app as frontend_app
from services.frontend.config import FrontendConfig, HttpConfig
from services.prefill.app import app as prefill_app
from services.prefill.config import PrefillConfig
from services.router.app import app as router_app
from services.router.config import RouterConfig
from services.tokenizer.app import app as tokenizer_app
from services.tokenizer.config import TokenizerConfig

pytestmark = pytest.mark.timeout(3600)

REQUESTS = 1000
"""Requests of all fuzzers in a usual run."""

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]

Code = grpc.StatusCode

REFUSED = {Code.INVALID_ARGUMENT, Code.NOT_FOUND}
"""What a message alone can be answered with, beside OK."""

CLIENTS = {Code.DEADLINE_EXCEEDED, Code.CANCELLED}
"""What a client's own deadlines and cancels are answered with."""


@dataclass
class Rig:
    """The mesh, and the loop that it lives on."""

    runner: asyncio.Runner
    mesh: Mesh
    channel: Any
    fuzz: Fuzz

    def on_many(self, test: Any, share: float = 0.125) -> None:
        """Run a hypothesis test; then all is as it was before."""
        self.fuzz.run(test, self.fuzz.count(round(REQUESTS * share), share))
        self.run(self.sane())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    async def sane(self) -> None:
        """A normal request is answered, and nothing is left of the others."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        request = inference_pb2.GenerateRequest(model=NAME)
        request.input.text = "The capital of France"
        request.input.sampling.max_tokens = 3
        response = await stub.Generate(request, timeout=SECONDS)
        assert response.completion.usage.completion_tokens == 3
        await self.idle()

    async def quiet(self) -> None:
        """Wait until nothing runs anywhere."""
        async with asyncio.timeout(SECONDS):
            for node in reversed(self.mesh.nodes):  # the frontend first: it asks the others
                await node.process.gate.idle()

    async def idle(self) -> None:
        """Wait until nothing runs or is held anywhere."""
        await until(lambda: not any(map(held, self.mesh.nodes)), SECONDS)


def held(node: Node) -> dict[str, float]:
    """What a process runs or keeps for anybody."""
    page = node.process.telemetry.render().decode().splitlines()
    loads = ("running", "waiting", "used_blocks", "ticket_blocks")
    lines = [line.rpartition(" ") for line in page]
    values = {
        name: float(value)
        for name, _, value in lines
        if any(name == f"kvmesh_engine_{load}" for load in loads)
    }
    values["gate"] = node.process.gate.running
    return {name: value for name, value in values.items() if value}


async def started(running: Mesh, folder: Path) -> Node:
    model = ModelConfig(path=folder, name="tiny")
    sim = SimConfig(sample_from=10, latency=Latency(speed=0.0), total_blocks=512)
    engine = EngineConfig(name="sim", sim=sim)
    await running.start(Role.TOKENIZER, tokenizer_app, TokenizerConfig(model=model))
    prefilling = PrefillConfig(model=model, engine=engine)
    await running.start(Role.PREFILL, worker(prefill_app), prefilling)
    decoding = DecodeConfig(model=model, engine=engine)
    await running.start(Role.DECODE, worker(decode_app), decoding)
    await running.start(Role.ROUTER, router_app, RouterConfig())
    return await running.start(Role.FRONTEND, frontend_app, FrontendConfig(http=HttpConfig(port=0)))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, fuzz: Fuzz) -> Iterator[Rig]:
    folder = byte_level_folder(tmp_path_factory.mktemp("model"))
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    facts = {"vocab_size": size, "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    with asyncio.Runner() as runner:
        whole = mesh()
        running = runner.run(whole.__aenter__())
        try:
            frontend = runner.run(started(running, folder))
            channel = runner.run(_channel(frontend.member.address))
            runner.run(until(lambda: _answers(channel), SECONDS))
            yield Rig(runner, running, channel, fuzz)
            runner.run(channel.close())
        finally:
            runner.run(whole.__aexit__(None, None, None))


async def _channel(address: str) -> Any:
    return grpc.aio.insecure_channel(address, options=RpcConfig().channel_options())


async def _answers(channel: Any) -> bool:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    request = inference_pb2.GenerateRequest(model=NAME)
    request.input.text = "hi"
    request.input.sampling.max_tokens = 1
    try:
        await stub.Generate(request, timeout=SECONDS)
    except grpc.aio.AioRpcError:
        return False
    return True


# One message


@pytest.mark.parametrize("name", ["Generate", "StreamGenerate", "ListModels"])
def test_any_message_is_answered_or_refused_for_what_it_is(rig: Rig, name: str) -> None:
    kind = getattr(inference_pb2, f"{name}Request")

    @given(message=anything(kind), metadata=METADATA, timeout=TIMEOUTS)
    def sends(message: Any, metadata: Any, timeout: Any) -> None:
        sent = rig.run(send(rig, name, message.SerializeToString(), metadata, timeout))
        rig.fuzz.saw(f"grpc {name}", sent.code.name)
        check(sent, metadata, timeout)
        if sent.error is None and name != "ListModels":
            made_sense(message, sent.responses)

    rig.on_many(sends)


@pytest.mark.parametrize("name", ["Generate", "StreamGenerate", "ListModels"])
def test_bytes_that_are_no_message_are_refused(rig: Rig, name: str) -> None:
    kind = getattr(inference_pb2, f"{name}Request")

    @given(data=broken(good(kind)))
    def sends(data: bytes) -> None:
        sent = rig.run(send(rig, name, data, (), SECONDS))
        rig.fuzz.saw(f"grpc {name} bytes", sent.code.name)
        check(sent, (), SECONDS)
        if not valid(kind, data):
            assert sent.code is Code.INVALID_ARGUMENT

    rig.on_many(sends)


@dataclass
class Sent:
    responses: list[Any]
    error: grpc.aio.AioRpcError | None

    @property
    def code(self) -> grpc.StatusCode:
        return Code.OK if self.error is None else self.error.code()


async def send(rig: Rig, name: str, data: bytes, metadata: Any, timeout: Any) -> Sent:
    method = SERVICE.methods_by_name[name]
    kind = "unary_stream" if method.server_streaming else "unary_unary"
    decode = getattr(inference_pb2, f"{name}Response").FromString
    rpc = getattr(rig.channel, kind)(
        f"/{SERVICE.full_name}/{name}", request_serializer=None, response_deserializer=decode
    )(data, metadata=tuple(metadata), timeout=timeout)
    responses: list[Any] = []
    try:
        async with asyncio.timeout(SECONDS):
            if method.server_streaming:
                responses.extend([response async for response in rpc])
            else:
                responses.append(await rpc)
    except grpc.aio.AioRpcError as error:
        return Sent(responses, error)
    return Sent(responses, None)


def check(sent: Sent, metadata: Any, timeout: Any) -> None:
    error = sent.error
    if error is None:
        return
    allowed = set(REFUSED)
    if timeout is not None and timeout < SECONDS:
        allowed |= CLIENTS
    if sum(len(value) for _, value in metadata) > 8000:
        allowed |= {Code.RESOURCE_EXHAUSTED}
    assert error.code() in allowed, (error.code(), error.details())
    if error.code() in REFUSED:
        assert reason_of(error)
        assert len(error.details() or "") <= 1000


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The one reason in an error's details."""
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, "an error without details"
    infos = [d for d in status.details if d.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    info = error_details_pb2.ErrorInfo()
    (one,) = infos
    assert one.Unpack(info)
    assert info.domain == "kvmesh"
    return str(info.reason)


def made_sense(message: Any, responses: Sequence[Any]) -> None:
    """Check an answer against its request."""
    sampling = message.input.sampling
    last = responses[-1]
    assert last.HasField("completion")
    usage = last.completion.usage
    assert usage.prompt_tokens
    assert usage.cached_tokens <= usage.prompt_tokens
    if sampling.HasField("max_tokens"):
        assert usage.completion_tokens <= sampling.max_tokens
    if message.input.truncate_to:
        assert usage.prompt_tokens <= message.input.truncate_to
    scores = [score for response in responses for score in response.logprobs]
    if not sampling.HasField("logprobs"):
        assert not scores
    assert all(score.token.logprob <= 0 for score in scores)
    assert all(len(score.top) <= sampling.logprobs for score in scores)
    if len(responses) > 1:
        assert all(response.text for response in responses[:-1])


def valid(kind: Any, data: bytes) -> bool:
    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True


# Many requests on one stream


def test_any_conversation_on_a_stream_keeps_to_the_protocol(rig: Rig) -> None:
    @given(said=conversations())
    def talks(said: list[bytes]) -> None:
        due = expected(said)
        # gRPC's client makes an error of its own of what is written after the end.
        sent = rig.run(converse(rig, said[: due.taken]))
        rig.fuzz.saw("grpc MultiplexGenerate", sent.code.name)
        assert sent.code is due.code, sent.error and sent.error.details()
        if sent.error is not None:
            assert reason_of(sent.error)
        keeps_to_the_protocol(rig, sent.responses, due)
        rig.run(rig.quiet())

    rig.on_many(talks)


async def converse(rig: Rig, said: Sequence[bytes]) -> Sent:
    rpc = rig.channel.stream_stream(
        f"/{SERVICE.full_name}/MultiplexGenerate",
        request_serializer=None,
        response_deserializer=inference_pb2.MultiplexGenerateResponse.FromString,
    )(_saying(said), timeout=SECONDS)
    responses: list[Any] = []
    try:
        while (response := await rpc.read()) is not grpc.aio.EOF:
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        return Sent(responses, error)
    return Sent(responses, None)


async def _saying(said: Sequence[bytes]) -> Any:
    for data in said:
        yield data


def keeps_to_the_protocol(rig: Rig, responses: Sequence[Any], due: Expected) -> None:
    allowed = {code.value[0]: code.name for code in (*REFUSED, *CLIENTS)}
    assert [response.sequence for response in responses] == list(range(1, len(responses) + 1))
    ended: list[int] = []
    for at, response in enumerate(responses):
        assert response.HasField("opened") == (at == 0)
        for delta in response.deltas:
            assert delta.stream_id in due.started
            assert delta.stream_id not in ended
        for end in response.ends:
            ended.append(end.stream_id)
            code = allowed[end.error.code] if end.HasField("error") else "OK"
            rig.fuzz.saw("grpc MultiplexGenerate, by request", code)
    assert len(set(ended)) == len(ended)
    assert set(ended) <= set(due.started)
    if due.code is Code.OK:
        assert set(ended) == set(due.started)


def test_requests_in_the_opening_message_are_refused_not_forgotten(rig: Rig) -> None:
    first = opening()
    first.starts.add(stream_id=1, model=NAME)
    sent = rig.run(converse(rig, [first.SerializeToString()]))
    assert sent.code is Code.FAILED_PRECONDITION


def test_streams_that_are_left_in_the_middle_leave_nothing(rig: Rig) -> None:
    @given(said=conversations(), read=st.integers(0, 4))
    def leaves(said: list[bytes], read: int) -> None:
        rig.run(leave(rig, said, read))
        rig.run(rig.quiet())

    rig.on_many(leaves, share=0.06)


async def leave(rig: Rig, said: Sequence[bytes], read: int) -> None:
    rpc = rig.channel.stream_stream(
        f"/{SERVICE.full_name}/MultiplexGenerate",
        request_serializer=None,
        response_deserializer=None,
    )(_saying(said), timeout=SECONDS)
    try:
        for _ in range(read):
            if await rpc.read() is grpc.aio.EOF:
                return
    except grpc.aio.AioRpcError:
        return
    finally:
        rpc.cancel()
