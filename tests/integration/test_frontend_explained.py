"""What a caller who asks is told of the workers that answer: over REST and over gRPC."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvmesh.errors import OverloadedError, UnavailableError
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.types import Worker
from kvmesh.v1 import inference_pb2, inference_pb2_grpc
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig
from services.frontend.rest.explaining import HEADERS, PREFIX

NAME = f"models/{MODEL}"
ASK = {"x-kvmesh-explain": "1"}
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
VISIBLE = re.compile(r"[ -~]*")


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    """Prefill and decode apart, two of each."""
    async with fake_mesh(app, _config(), prefills=2, decodes=2, remote=True) as running:
        yield running


def _config(*, explain: bool = True) -> FrontendConfig:
    return FrontendConfig(http=HttpConfig(port=0), limits=LimitsConfig(explain=explain))


def told(response: httpx.Response) -> dict[str, str]:
    """Return the headers that explain, without their prefix; all are text and described."""
    found = {
        name.removeprefix(PREFIX): value
        for name, value in response.headers.items()
        if name.startswith(PREFIX)
    }
    assert found.keys() <= HEADERS.keys()
    assert all(VISIBLE.fullmatch(value) and value == value.strip() for value in found.values())
    return found


def ids(mesh: FakeMesh) -> dict[str, str]:
    names = {"decode": mesh.decode, "prefill": mesh.prefill, "router": mesh.router}
    return {name: mesh.node(fake).member.id for name, fake in names.items()}


# REST


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_name_the_workers_and_why(
    mesh: FakeMesh, client: httpx.AsyncClient, *, stream: bool
) -> None:
    response = await client.post(CHAT, json=BODY | {"stream": stream}, headers=ASK)

    names = ids(mesh)
    assert response.status_code == 200
    assert told(response) == {
        "request-id": mesh.decode.starts[0].context.request_id,
        "decode-worker": names["decode"],
        "prefill-worker": names["prefill"],
        "prefill": "remote",
        "prefill-reason": "configured",
        "prompt-tokens": str(mesh.router.starts[0].prompt_tokens),
        "expected-cached-tokens": "2",
        "policy": "first",
        "router": names["router"],
        "queue-seconds": "0.250000",
        "why": "fake: the first of each",
        "attempts": "1",
    }


async def test_headers_come_before_the_first_byte_of_a_stream_ends(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    async def halting(fake: Any, start: Any, emit: Any) -> Any:
        emit(list(b"Hello"))
        await fake.gate.wait()
        raise UnavailableError("gone")

    mesh.decode.script = halting
    body = BODY | {"stream": True}
    async with asyncio.timeout(10), client.stream("POST", CHAT, json=body, headers=ASK) as response:
        assert told(response)["decode-worker"] == ids(mesh)["decode"]
        mesh.decode.gate.set()
        await response.aread()


@pytest.mark.parametrize("value", ["", "0", "no", "1 1"])
async def test_nobody_is_told_who_did_not_ask(client: httpx.AsyncClient, value: str) -> None:
    response = await client.post(CHAT, json=BODY, headers={"x-kvmesh-explain": value})
    assert response.status_code == 200
    assert told(response) == {}


async def test_an_operator_may_keep_it_secret() -> None:
    async with (
        fake_mesh(app, _config(explain=False)) as closed,
        httpx.AsyncClient(base_url=closed.url, verify=False, trust_env=False) as client,
    ):
        response = await client.post(CHAT, json=BODY, headers=ASK)
        assert response.status_code == 200
        assert told(response) == {}


async def test_a_local_prefill_is_called_so(mesh: FakeMesh, client: httpx.AsyncClient) -> None:
    mesh.remote = False
    found = told(await client.post(CHAT, json=BODY, headers=ASK))
    assert (found["prefill-worker"], found["prefill"]) == ("none", "local")


async def test_failed_prefills_show_and_the_last_resort_has_a_reason_of_its_own(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    first, second = (mesh.node(prefill).member.id for prefill in mesh.prefills)
    mesh.prefill.refuses = UnavailableError("gone")
    found = told(await client.post(CHAT, json=BODY, headers=ASK))
    assert found["prefill-worker"] == second
    assert found["attempts"] == "2"
    assert found["failures"] == f"prefill {first} UNAVAILABLE"

    mesh.prefills[1].refuses = OverloadedError("full")
    found = told(await client.post(CHAT, json=BODY | {"stream": True}, headers=ASK))
    assert (found["prefill-worker"], found["attempts"]) == ("none", "3")
    assert found["failures"] == f"prefill {first} UNAVAILABLE, prefill {second} OVERLOADED"


async def test_a_plan_that_is_overruled_says_so(mesh: FakeMesh, client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "tell me", "echo": True, "logprobs": 1, "max_tokens": 2}
    found = told(await client.post("/v1/completions", json=body, headers=ASK))
    assert (found["prefill"], found["prefill-reason"]) == ("local", "prompt_logprobs")


async def test_a_request_that_fails_is_explained_as_far_as_it_came(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    for worker in mesh.decodes:
        worker.refuses = UnavailableError("gone")
    response = await client.post(CHAT, json=BODY, headers=ASK)
    assert response.status_code == 503
    found = told(response)
    assert found["failures"].count("decode ") == 2
    assert found["attempts"] == "2"

    mesh.router.refuses = OverloadedError("the queue is full")
    response = await client.post(CHAT, json=BODY, headers=ASK)
    assert response.status_code == 429
    assert told(response).keys() == {"request-id"}


async def test_without_a_router_none_is_named() -> None:
    async with (
        fake_mesh(app, _config(), router=False) as lone,
        httpx.AsyncClient(base_url=lone.url, verify=False, trust_env=False) as client,
    ):
        found = told(await client.post(CHAT, json=BODY, headers=ASK))
        assert (found["router"], found["prefill-reason"]) == ("none", "no_router")


@pytest.mark.parametrize("stream", [False, True])
async def test_of_several_choices_one_is_told_of(
    client: httpx.AsyncClient, *, stream: bool
) -> None:
    response = await client.post(CHAT, json=BODY | {"n": 3, "stream": stream}, headers=ASK)
    found = told(response)
    assert found["choices"] == "3"
    assert found["choice"] in ("0", "1", "2")
    assert found["choice"] == "0" or stream
    assert "decode-worker" in found


async def test_what_needs_no_worker_names_none(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "tell me", "echo": True, "max_tokens": 0}
    response = await client.post("/v1/completions", json=body, headers=ASK)
    assert response.json()["choices"][0]["text"] == "tell me"
    assert told(response).keys() == {"request-id"}


# gRPC


@pytest.fixture
async def peer(mesh: FakeMesh) -> AsyncIterator[Peer]:
    member = mesh.frontend.member
    one = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
    yield one
    await one.aclose()


@pytest.fixture
def stub(peer: Peer) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(peer.channel)


def given(*, explain: bool = True) -> inference_pb2.GenerateInput:
    return inference_pb2.GenerateInput(text="hi", explain=explain)


async def test_grpc_answers_have_it_as_a_field(stub: Any, mesh: FakeMesh) -> None:
    first = mesh.node(mesh.prefill).member.id
    mesh.prefill.refuses = UnavailableError("gone")
    response = await stub.Generate(inference_pb2.GenerateRequest(model=NAME, input=given()))

    found, names = response.explanation, ids(mesh)
    assert found.decode_worker_id == names["decode"]
    assert found.prefill_worker_id == mesh.node(mesh.prefills[1]).member.id
    assert found.router_id == names["router"]
    assert (found.reason, found.policy, found.queue_seconds) == ("configured", "first", 0.25)
    assert (found.prompt_tokens, found.expected_cached_tokens) == (2, 2)
    assert found.why == "fake: the first of each"
    (failure,) = found.failures
    assert (failure.step, failure.worker_id, failure.reason) == ("prefill", first, "UNAVAILABLE")


async def test_grpc_streams_have_it_in_their_first_message_only(stub: Any, mesh: FakeMesh) -> None:
    request = inference_pb2.StreamGenerateRequest(model=NAME, input=given())
    responses = [response async for response in stub.StreamGenerate(request)]
    assert responses[0].explanation.decode_worker_id == ids(mesh)["decode"]
    assert not any(response.HasField("explanation") for response in responses[1:])


async def test_grpc_says_nothing_to_who_did_not_ask(stub: Any) -> None:
    request = inference_pb2.GenerateRequest(model=NAME, input=given(explain=False))
    assert not (await stub.Generate(request)).HasField("explanation")


async def test_a_multiplexed_stream_tells_of_each_request_that_asks(
    peer: Peer, stub: Any, mesh: FakeMesh
) -> None:
    async def asking() -> AsyncIterator[inference_pb2.MultiplexGenerateRequest]:
        opening = inference_pb2.MultiplexGenerateRequest()
        opening.open.schema_revision = 1
        yield opening
        starts = inference_pb2.MultiplexGenerateRequest()
        for number, explain in ((1, True), (2, False), (3, True)):
            start = starts.starts.add(stream_id=number, model=NAME)
            start.input.CopyFrom(given(explain=explain))
        yield starts
        await done.wait()

    done = asyncio.Event()
    explained, texts, ended = [], set(), set()
    async with asyncio.timeout(10):
        async for message in stub.MultiplexGenerate(asking()):
            for entry in message.explanations:
                assert entry.stream_id not in texts
                explained.append(entry.stream_id)
                assert entry.explanation.decode_worker_id == ids(mesh)["decode"]
            texts |= {delta.stream_id for delta in message.deltas}
            ended |= {end.stream_id for end in message.ends}
            if len(ended) == 3:
                done.set()
    assert sorted(explained) == [1, 3]
