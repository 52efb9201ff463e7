"""What names a session to the router, through both APIs."""

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


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, FrontendConfig(http=HttpConfig(port=0))) as running:
        yield running


async def named_by_rest(mesh: FakeMesh, header: str | None = None, **more: Any) -> str:
    headers = {} if header is None else {"x-kvmesh-session": header}
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
        body = {"model": MODEL, "prompt": "hi", **more}
        response = await client.post("/v1/completions", json=body, headers=headers, timeout=20)
    assert response.status_code == 200, response.text
    return str(mesh.router.starts[-1].session_key)


async def named_by_grpc(mesh: FakeMesh, session: str) -> str:
    member = mesh.frontend.member
    peer = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
    stub: Any = inference_pb2_grpc.InferenceServiceStub(peer.channel)
    given = inference_pb2.GenerateInput(text="hi", session=session)
    await stub.Generate(inference_pb2.GenerateRequest(model=f"models/{MODEL}", input=given))
    await peer.aclose()
    return str(mesh.router.starts[-1].session_key)


async def test_a_session_has_one_name_however_it_comes(mesh: FakeMesh) -> None:
    name = await named_by_rest(mesh, "chat-17")
    assert name
    assert await named_by_rest(mesh, prompt_cache_key="chat-17") == name
    assert await named_by_rest(mesh, "chat-17", prompt_cache_key="chat-18") == name
    assert await named_by_grpc(mesh, "chat-17") == name
    assert await named_by_rest(mesh, "chat-18") != name


async def test_without_a_session_there_is_no_name(mesh: FakeMesh) -> None:
    assert await named_by_rest(mesh) == ""
    assert await named_by_rest(mesh, "", prompt_cache_key="") == ""
    assert await named_by_grpc(mesh, "") == ""


async def test_a_callers_words_do_not_travel(mesh: FakeMesh) -> None:
    name = await named_by_rest(mesh, prompt_cache_key="Анна " * 10_000)
    assert name.isascii()
    assert len(name) == 16
