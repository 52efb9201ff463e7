"""What the public gRPC service honours beside the prompt: keys, log probabilities, options."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvmesh.errors import MeshError, UnauthenticatedError
from kvmesh.rpc.calls import BatchCall
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.specs import GENERATE
from kvmesh.rpc.status import from_rpc_error
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.types import Worker
from kvmesh.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig

NAME = f"models/{MODEL}"
KEY = "sésame"


@asynccontextmanager
async def frontend(**http: Any) -> AsyncIterator[tuple[FakeMesh, Peer, Any]]:
    async with fake_mesh(app, FrontendConfig(http=HttpConfig(port=0, **http))) as mesh:
        member = mesh.frontend.member
        peer = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
        yield mesh, peer, inference_pb2_grpc.InferenceServiceStub(peer.channel)
        await peer.aclose()


def given(text: str = "tell me", **more: Any) -> inference_pb2.GenerateInput:
    return inference_pb2.GenerateInput(text=text, **more)


def asked(**sampling: Any) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(**sampling)


async def failure(rpc: Any) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc
    return from_rpc_error(caught.value)


def scores(entries: Sequence[Any]) -> list[tuple[bytes, float, int]]:
    return [(e.token.text, round(e.token.logprob, 4), e.text_offset) for e in entries]


LOGPROBS = [(bytes([t]), -t / 100, at) for at, t in enumerate(b"Hello, ")]


async def test_a57_logprobs_come_with_their_text_in_all_three_ways() -> None:
    async with frontend() as (mesh, peer, stub):
        mesh.decode.script = fakes.babble
        wanted = given(sampling=asked(logprobs=2), stop=["wor"])
        whole = await stub.Generate(inference_pb2.GenerateRequest(model=NAME, input=wanted))
        assert whole.text == "Hello, "
        assert scores(whole.logprobs) == LOGPROBS
        assert [score.token_id for score in whole.logprobs[0].top] == [ord("H"), ord("I")]

        streamed = inference_pb2.StreamGenerateRequest(model=NAME, input=wanted)
        responses = [response async for response in stub.StreamGenerate(streamed)]
        assert [one for r in responses for one in scores(r.logprobs)] == LOGPROBS
        for response in responses:
            assert b"".join(e.token.text for e in response.logprobs) == response.text.encode()

        call = BatchCall(peer.stream(GENERATE), lambda delta: scores(delta.logprobs))
        start = call.request.starts.add(stream_id=call.stream_id, model=NAME)
        start.input.CopyFrom(wanted)
        found, end = [], None
        while end is None:
            pieces, end = await call.next()
            found += [one for piece in pieces for one in piece]
        assert found == LOGPROBS
        await mesh.idle()


async def test_options_of_the_text_and_of_the_prompt() -> None:
    async with frontend() as (mesh, _, stub):
        request = inference_pb2.GenerateRequest(
            model=NAME, input=given(stop=["wor"], include_stop=True, truncate_to=3)
        )
        response = await stub.Generate(request)
        assert response.text == "Hello, wor"
        assert response.completion.usage.prompt_tokens == 3
        (start,) = mesh.decode.starts
        assert bytes(start.token_ids) == b" me"
        await stub.Generate(
            inference_pb2.GenerateRequest(
                model=NAME,
                input=given(keep_special=True, add_special_tokens=False, sampling=asked()),
            )
        )
        assert mesh.tokenizer.detokenizes[-1].keep_special
        assert not mesh.tokenizer.starts[-1].add_special_tokens


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", "Bearer"),),
        (("authorization", "c2VzYW1l"),),
        (("authorization", "Bearer right"), ("authorization", "Bearer right")),
    ],
)
async def test_a25_without_a_key_nothing_is_served(metadata: Any) -> None:
    async with frontend(api_keys=("right", KEY)) as (mesh, _, stub):
        unary = inference_pb2.GenerateRequest(model=NAME, input=given())
        streamed = inference_pb2.StreamGenerateRequest(model=NAME, input=given())
        rpcs = [
            stub.Generate(unary, metadata=metadata),
            anext(aiter(stub.StreamGenerate(streamed, metadata=metadata))),
            anext(aiter(stub.MultiplexGenerate(iter(()), metadata=metadata))),
            stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
        ]
        for rpc in rpcs:
            assert isinstance(await failure(rpc), UnauthenticatedError)
        assert not mesh.tokenizer.starts


async def test_a25_one_of_the_keys_is_enough() -> None:
    async with frontend(api_keys=("other", "right")) as (_, __, stub):
        request = inference_pb2.GenerateRequest(model=NAME, input=given())
        response = await stub.Generate(request, metadata=(("authorization", "bearer right"),))
        assert response.text == "Hello, world!"
