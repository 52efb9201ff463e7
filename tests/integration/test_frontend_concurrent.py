"""Decode beside prefill: the ticket comes first, whatever becomes of the prompt after it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvmesh.errors import EngineError, OverloadedError, TicketError, TransferError, UnavailableError
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL, FakeDecode
from kvmesh.types import FinishReason, Leg
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig

ANSWER = "Hello, world!"


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    """Two prefill workers, whose tickets come first, and two decode workers."""
    config = FrontendConfig(http=HttpConfig(port=0))
    async with fake_mesh(app, config, prefills=2, decodes=2, remote=True) as running:
        for prefill in running.prefills:
            prefill.early = True
            prefill.hold = asyncio.Event()
        yield running


async def ask(mesh: FakeMesh, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "tell me", "max_tokens": 100, **more}
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
        return await client.post("/v1/completions", json=body, timeout=20)


def answered(response: httpx.Response) -> None:
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == ANSWER


def compute(mesh: FakeMesh) -> None:
    """Let the prompts be computed."""
    for prefill in mesh.prefills:
        assert prefill.hold is not None
        prefill.hold.set()


async def waits(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
    """Wait for the KV, as far as a fake can."""
    if start.HasField("ticket"):
        await fake.gate.wait()
    return await fakes.say(fake, start, emit)


async def both(mesh: FakeMesh) -> asyncio.Task[httpx.Response]:
    """Ask, and return when decode waits beside prefill."""
    for decode in mesh.decodes:
        decode.script = waits
    asking = asyncio.create_task(ask(mesh))
    await mesh.decode.until(lambda: mesh.decode.live == 1)
    assert mesh.prefill.live == 1
    assert mesh.router.prefilled == []
    return asking


async def test_decode_is_dispatched_while_the_prompt_is_computed(mesh: FakeMesh) -> None:
    asking = await both(mesh)
    compute(mesh)
    await mesh.router.until(lambda: mesh.router.prefilled == [1])
    assert not asking.done()
    mesh.decode.gate.set()
    response = await asking
    answered(response)
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert mesh.decode.starts[0].ticket.ticket_id == "ticket-1"
    await mesh.idle()
    assert mesh.prefill.cancelled == []
    assert mesh.prefill.released == []
    assert mesh.router.failed == []


async def test_tokens_may_overtake_the_end_of_prefill(mesh: FakeMesh) -> None:
    """They are proof enough that the prompt is computed."""
    answered(await ask(mesh))
    await mesh.idle()
    assert mesh.router.prefilled == [1]
    assert mesh.router.failed == []


@pytest.mark.parametrize("error", [EngineError("died"), UnavailableError("goes away")])
async def test_a_prompt_that_fails_after_its_ticket_is_computed_elsewhere(
    mesh: FakeMesh, error: UnavailableError
) -> None:
    mesh.prefill.failure = error
    asking = await both(mesh)
    compute(mesh)
    await mesh.prefills[1].until(lambda: mesh.prefills[1].given == 1)
    await mesh.decode.until(lambda: len(mesh.decode.starts) == 2)
    mesh.decode.gate.set()
    answered(await asking)
    await mesh.idle()
    assert mesh.router.failed == [Leg.PREFILL]
    assert len(mesh.decode.cancelled) == 1  # the one that waited in vain
    assert mesh.prefill.released == []  # its lease ended with it


async def test_overload_after_the_ticket_is_nobodys_fault(mesh: FakeMesh) -> None:
    mesh.prefill.failure = OverloadedError("no blocks are left")
    asking = await both(mesh)
    compute(mesh)
    mesh.decode.gate.set()
    answered(await asking)
    await mesh.idle()
    assert mesh.router.failed == []


async def test_a_prefill_worker_that_dies_is_replaced(mesh: FakeMesh) -> None:
    asking = await both(mesh)
    await mesh.node(mesh.prefill).kill()
    await mesh.decode.until(lambda: len(mesh.decode.starts) == 2)
    assert mesh.decode.starts[1].ticket.worker_id == mesh.node(mesh.prefills[1]).member.id
    mesh.decode.gate.set()
    answered(await asking)


@pytest.mark.parametrize("error", [TicketError("closed"), TransferError("not computed in time")])
async def test_decode_that_gets_no_kv_stops_prefill(mesh: FakeMesh, error: Exception) -> None:
    async def fails(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        if start.HasField("ticket"):
            raise error
        return await fakes.say(fake, start, emit)

    mesh.decode.script = fails
    answered(await ask(mesh))
    await mesh.idle()
    assert [len(prefill.cancelled) for prefill in mesh.prefills] == [1, 1]
    assert [prefill.released for prefill in mesh.prefills] == [["ticket-1"], ["ticket-1"]]
    assert mesh.router.failed == [Leg.HANDOFF, Leg.HANDOFF]


async def test_decode_that_refuses_stops_prefill(mesh: FakeMesh) -> None:
    mesh.decode.refuses = OverloadedError("full")
    compute(mesh)
    answered(await ask(mesh))
    await mesh.idle()
    assert mesh.prefill.released == ["ticket-1"]
    assert [len(decode.starts) for decode in mesh.decodes] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_both(mesh: FakeMesh, stream: bool) -> None:
    mesh.decode.script = waits
    asking = asyncio.create_task(ask(mesh, stream=stream))
    await mesh.decode.until(lambda: mesh.decode.live == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(5):
        await mesh.gone()
        await mesh.idle()
    assert len(mesh.prefill.cancelled) == len(mesh.decode.cancelled) == 1
    assert mesh.router.failed == []


async def test_an_answer_that_ends_first_stops_prefill(mesh: FakeMesh) -> None:
    """As where a stop string comes; nothing is computed that nobody waits for."""
    answered(await ask(mesh))
    await mesh.idle()
    assert len(mesh.prefill.cancelled) == 1
