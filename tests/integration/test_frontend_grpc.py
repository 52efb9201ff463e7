"""The public gRPC service, as a client sees it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    DrainingError,
    InvalidRequestError,
    MeshError,
    UnavailableError,
    UnknownModelError,
)
from kvmesh.rpc.calling import ClientStream
from kvmesh.rpc.calls import BatchCall
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.specs import GENERATE
from kvmesh.rpc.status import from_rpc_error
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.types import Completion, FinishReason, Usage, Worker
from kvmesh.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig

NAME = f"models/{MODEL}"

NO_WORD = [generation_pb2.TokenSequence()]


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, FrontendConfig(http=HttpConfig(port=0))) as running:
        yield running


@pytest.fixture
async def peer(mesh: FakeMesh) -> AsyncIterator[Peer]:
    member = mesh.frontend.member
    one = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
    yield one
    await one.aclose()


@pytest.fixture
def stub(peer: Peer) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(peer.channel)


def given(text: str = "hi", **more: Any) -> inference_pb2.GenerateInput:
    return inference_pb2.GenerateInput(text=text, **more)


async def failure(rpc: Any) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc
    return from_rpc_error(caught.value)


async def test_generate(stub: Any, mesh: FakeMesh) -> None:
    response = await stub.Generate(inference_pb2.GenerateRequest(model=NAME, input=given()))
    assert response.text == "Hello, world!"
    assert response.completion.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert response.completion.usage.completion_tokens == 13
    assert response.completion.usage.prompt_tokens == 2
    assert response.request_id == mesh.decode.starts[0].context.request_id


async def test_stream_generate_says_the_same(stub: Any) -> None:
    request = inference_pb2.StreamGenerateRequest(model=NAME, input=given(stop=["wor"]))
    responses = [response async for response in stub.StreamGenerate(request)]
    assert "".join(response.text for response in responses) == "Hello, "
    assert [response.WhichOneof("event") for response in responses][-1] == "completion"
    assert responses[-1].completion.stop_string == "wor"
    assert len({response.request_id for response in responses}) == 1


async def test_bad_words_go_to_the_engines_as_token_ids(stub: Any, mesh: FakeMesh) -> None:
    mesh.remote = True
    sampling = generation_pb2.SamplingParams()
    sampling.bad_words.add(ids=[7, 8])
    message = given(bad_words=["ab", "c"], sampling=sampling)
    await stub.Generate(inference_pb2.GenerateRequest(model=NAME, input=message))
    assert list(mesh.tokenizer.starts[0].bad_words) == ["ab", "c"]
    for start in (mesh.prefill.starts[0], mesh.decode.starts[0]):
        found = [bytes(sequence.ids) for sequence in start.sampling.bad_words]
        assert found == [b"\7\b", b"ab", b"c"]


async def test_ranks_come_with_the_log_probabilities(stub: Any, mesh: FakeMesh) -> None:
    message = given(sampling=generation_pb2.SamplingParams(logprobs=1))
    response = await stub.Generate(inference_pb2.GenerateRequest(model=NAME, input=message))
    ranks = [entry.rank for entry in response.logprobs]
    assert ranks == [token + 1 for token in mesh.decode.answer.encode()]


@pytest.mark.parametrize(
    ("model", "message", "kind", "field"),
    [
        (MODEL, given(), InvalidRequestError, "model"),
        ("models/", given(), InvalidRequestError, "model"),
        ("models/other", given(), UnknownModelError, "model"),
        (NAME, None, InvalidRequestError, "input"),
        (NAME, inference_pb2.GenerateInput(), InvalidRequestError, "prompt"),
        (NAME, given(""), InvalidRequestError, "prompt"),
        (NAME, given(stop=[""]), InvalidRequestError, "stop"),
        (NAME, given(stop=["s"] * 17), InvalidRequestError, "stop"),
        (NAME, given(stop=["s" * 1025]), InvalidRequestError, "stop"),
        (NAME, given(bad_words=[""]), InvalidRequestError, "bad_words"),
        (NAME, given(bad_words=["w"] * 129), InvalidRequestError, "bad_words"),
        (NAME, given(bad_words=["w" * 257]), InvalidRequestError, "bad_words"),
        (
            NAME,
            given(sampling=generation_pb2.SamplingParams(bad_words=NO_WORD)),
            InvalidRequestError,
            "bad_words",
        ),
        (
            NAME,
            given(sampling=generation_pb2.SamplingParams(stop_token_ids=[1] * 257)),
            InvalidRequestError,
            "stop_token_ids",
        ),
        (
            NAME,
            given(sampling=generation_pb2.SamplingParams(top_p=0)),
            InvalidRequestError,
            "top_p",
        ),
        (
            NAME,
            given(sampling=generation_pb2.SamplingParams(temperature=-1)),
            InvalidRequestError,
            "temperature",
        ),
        (
            NAME,
            given(sampling=generation_pb2.SamplingParams(prompt_logprobs=0)),
            InvalidRequestError,
            "prompt_logprobs",
        ),
        (
            NAME,
            given(sampling=generation_pb2.SamplingParams(logit_bias={5: 101})),
            InvalidRequestError,
            "logit_bias",
        ),
    ],
)
async def test_bad_input_is_refused_by_name(
    stub: Any, mesh: FakeMesh, model: str, message: Any, kind: type[MeshError], field: str
) -> None:
    unary = inference_pb2.GenerateRequest(model=model, input=message)
    error = await failure(stub.Generate(unary))
    assert type(error) is kind
    assert error.field == field
    streamed = inference_pb2.StreamGenerateRequest(model=model, input=message)
    assert type(await failure(anext(aiter(stub.StreamGenerate(streamed))))) is kind
    assert not mesh.tokenizer.starts


@pytest.mark.parametrize("name", ["Generate", "StreamGenerate"])
async def test_a_client_that_cancels_cancels_everything(
    stub: Any, mesh: FakeMesh, name: str
) -> None:
    mesh.decode.script = fakes.babble
    request = getattr(inference_pb2, f"{name}Request")(model=NAME, input=given())
    rpc = getattr(stub, name)(request)
    reading = asyncio.ensure_future(rpc if name == "Generate" else _drained(rpc))
    await mesh.decode.until(lambda: mesh.decode.live == 1 and bool(mesh.tokenizer.texts))
    rpc.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await mesh.gone()
    await mesh.idle()
    assert len(mesh.decode.cancelled) == 1


async def _drained(rpc: Any) -> None:
    async for _ in rpc:
        pass


async def test_the_rpcs_deadline_is_the_requests(stub: Any, mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.stall
    request = inference_pb2.GenerateRequest(model=NAME, input=given())
    error = await failure(stub.Generate(request, timeout=0.3))
    assert isinstance(error, DeadlineError)
    assert 0 < mesh.decode.starts[0].context.timeout.ToNanoseconds() <= 0.3e9
    await mesh.idle()


async def test_trace_context_comes_from_the_metadata(stub: Any, mesh: FakeMesh) -> None:
    trace = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    request = inference_pb2.GenerateRequest(model=NAME, input=given())
    await stub.Generate(request, metadata=(("traceparent", trace),))
    assert mesh.decode.starts[0].context.traceparent == trace
    await stub.Generate(request, metadata=(("traceparent", "x"),))
    assert mesh.decode.starts[1].context.traceparent == ""


async def test_models_are_listed_page_by_page(stub: Any, mesh: FakeMesh) -> None:
    response = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(model.name, model.context_length) for model in response.models] == [(NAME, 8192)]
    assert response.next_page_token == ""
    response = await stub.ListModels(inference_pb2.ListModelsRequest(page_token=MODEL))
    assert not response.models
    error = await failure(stub.ListModels(inference_pb2.ListModelsRequest(page_size=-1)))
    assert error.field == "page_size"
    await mesh.node(mesh.decode).stop()
    assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models


async def test_a_draining_frontend_refuses(stub: Any, mesh: FakeMesh) -> None:
    mesh.frontend.process.gate.close()
    error = await failure(stub.Generate(inference_pb2.GenerateRequest(model=NAME, input=given())))
    assert isinstance(error, DrainingError)


# The multiplexed stream


class Ask:
    """One request on the multiplexed stream."""

    def __init__(self, stream: ClientStream[Any, Any], model: str = NAME, **more: Any) -> None:
        self.call = BatchCall(stream, lambda delta: delta.text)
        start = self.call.request.starts.add(stream_id=self.call.stream_id, model=model)
        start.input.CopyFrom(given(**more))

    async def answer(self) -> tuple[str, Completion]:
        text = ""
        async with asyncio.timeout(10):
            while True:
                pieces, completion = await self.call.next()
                text += "".join(pieces)
                if completion is not None:
                    return text, completion


async def test_many_requests_share_a_stream(peer: Peer, mesh: FakeMesh) -> None:
    stream = peer.stream(GENERATE)
    asks = [Ask(stream) for _ in range(20)]
    for ask in asks:
        text, completion = await ask.answer()
        assert text == "Hello, world!"
        assert completion == Completion(FinishReason.STOP, Usage(2, 13, 5))
    ids = {start.context.request_id for start in mesh.decode.starts}
    assert len(ids) == 20
    await mesh.idle()


async def test_one_bad_request_leaves_the_others(peer: Peer) -> None:
    stream = peer.stream(GENERATE)
    bad, unknown, good = Ask(stream, "x"), Ask(stream, "models/other"), Ask(stream)
    with pytest.raises(InvalidRequestError):
        await bad.answer()
    with pytest.raises(UnknownModelError):
        await unknown.answer()
    assert (await good.answer())[0] == "Hello, world!"


async def test_a_cancel_ends_one_request(peer: Peer, mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.babble
    stream = peer.stream(GENERATE)
    first, second = Ask(stream), Ask(stream)
    await mesh.decode.until(lambda: mesh.decode.live == 2)
    stream.cancel(first.call.stream_id)
    with pytest.raises(CancelledByCallerError):
        await first.answer()
    await mesh.decode.until(lambda: mesh.decode.live == 1)
    mesh.decode.gate.set()
    assert (await second.answer())[0] == "Hello, world!"


async def test_a_lost_stream_cancels_all_of_it(peer: Peer, mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.babble
    asks = [Ask(peer.stream(GENERATE)) for _ in range(5)]
    await mesh.decode.until(lambda: mesh.decode.live == 5)
    await peer.aclose()
    await mesh.idle()
    await mesh.gone()
    with pytest.raises(UnavailableError):
        await asks[0].answer()
