"""Claims between a decode and a prefill engine, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from kvmesh.engine.vllm import claims
from kvmesh.engine.vllm.claims import Claimant, serve_claims
from kvmesh.errors import TicketError, TransferError


@pytest.fixture
async def claimant() -> AsyncIterator[Claimant]:
    asking = Claimant()
    yield asking
    asking.close()


async def test_claims_are_granted_or_refused(claimant: Claimant) -> None:
    asked: list[tuple[str, str]] = []

    def grant(epoch: str, ticket_id: str) -> bool:
        asked.append((epoch, ticket_id))
        return ticket_id == "held"

    async with serve_claims("127.0.0.1", grant) as address:
        await claimant.claim(address, "e", "held")
        with pytest.raises(TicketError):
            await claimant.claim(address, "e", "gone")
    assert asked == [("e", "held"), ("e", "gone")]


async def test_many_at_once_get_their_own_answers(claimant: Claimant) -> None:
    async with serve_claims("127.0.0.1", lambda _, ticket: int(ticket) % 2 == 0) as address:
        claiming = (claimant.claim(address, "e", str(number)) for number in range(40))
        answers = await asyncio.gather(*claiming, return_exceptions=True)
    assert [answer is None for answer in answers] == [number % 2 == 0 for number in range(40)]


async def test_a_dead_peer_is_told(claimant: Claimant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_TIMEOUT", 0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TransferError):
            await claimant.claim(address, "e", "held")


async def test_a_nonsense_address_is_told(claimant: Claimant) -> None:
    with pytest.raises(TransferError):
        await claimant.claim("nowhere", "e", "held")
