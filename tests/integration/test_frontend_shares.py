"""What names a caller's share to the router, through both APIs, and without its API key."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.types import Worker
from kvmesh.v1 import inference_pb2, inference_pb2_grpc
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig

KEYS = ("sk-one", "sk-two")


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    config = FrontendConfig(http=HttpConfig(port=0, api_keys=KEYS))
    async with fake_mesh(app, config) as running:
        yield running


async def by_rest(mesh: FakeMesh, key: str, **more: Any) -> str:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False, headers=headers) as client:
        body = {"model": MODEL, "prompt": "hi", **more}
        response = await client.post("/v1/completions", json=body, timeout=20)
    assert response.status_code == 200, response.text
    return str(mesh.router.starts[-1].fair_key)


async def by_grpc(mesh: FakeMesh, key: str, method: str) -> str:
    member = mesh.frontend.member
    peer = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
    stub: Any = inference_pb2_grpc.InferenceServiceStub(peer.channel)
    given = inference_pb2.GenerateInput(text="hi")
    shown = {"metadata": [("authorization", f"Bearer {key}")], "timeout": 20}
    model = f"models/{MODEL}"
    if method == "Generate":
        await stub.Generate(inference_pb2.GenerateRequest(model=model, input=given), **shown)
    elif method == "StreamGenerate":
        asked = inference_pb2.StreamGenerateRequest(model=model, input=given)
        assert [each async for each in stub.StreamGenerate(asked, **shown)]
    else:
        await _multiplexed(stub, model, given, shown)
    await peer.aclose()
    return str(mesh.router.starts[-1].fair_key)


async def _multiplexed(stub: Any, model: str, given: Any, shown: dict[str, Any]) -> None:
    call = stub.MultiplexGenerate(**shown)
    await call.write(inference_pb2.MultiplexGenerateRequest(open={"schema_revision": 1}))
    start = inference_pb2.GenerateStart(stream_id=1, model=model, input=given)
    await call.write(inference_pb2.MultiplexGenerateRequest(starts=[start]))
    async for response in call:
        if response.ends:
            break
    call.cancel()


async def test_a_key_is_one_share_through_every_api(mesh: FakeMesh) -> None:
    share = await by_rest(mesh, "sk-one")
    assert share
    assert await by_rest(mesh, "sk-one", user="somebody", prompt_cache_key="a") == share
    for method in ("Generate", "StreamGenerate", "MultiplexGenerate"):
        assert await by_grpc(mesh, "sk-one", method) == share, method
        assert await by_grpc(mesh, "sk-two", method) not in ("", share), method
    assert "sk-one" not in share


async def test_without_keys_what_callers_say_makes_no_share() -> None:
    async with fake_mesh(app, FrontendConfig(http=HttpConfig(port=0))) as mesh:
        assert await by_rest(mesh, "sk-one", user="somebody") == ""
        assert await by_grpc(mesh, "sk-one", "MultiplexGenerate") == ""
