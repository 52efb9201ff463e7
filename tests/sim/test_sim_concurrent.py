"""A decode that waits for a prompt which is never computed ends, whatever becomes of prefill."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvmesh.engine.base import EngineRequest, Step
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.engine.sim.faults import Faults
from kvmesh.engine.sim.latency import Latency
from kvmesh.engine.sim.model import expected
from kvmesh.errors import EngineError, TicketError, TransferError
from kvmesh.testing.cluster import until
from kvmesh.testing.engine import sim_engine, started
from kvmesh.types import KvTicket, Sampling

CONFIG = SimConfig(block_size=4, total_blocks=16, latency=Latency(speed=0))
STALLING = replace(CONFIG, faults=Faults(stall_after_steps=1))
MODEL = CONFIG.model("sim-model")
PROMPT = list(range(5, 15))


def ask(request_id: str, prompt: list[int] = PROMPT) -> EngineRequest:
    return EngineRequest(request_id, prompt, Sampling(12))


async def first(engine: SimEngine) -> None:
    """Use up the one step that a stalling engine makes."""
    async for _ in engine.generate(EngineRequest("first", [1], Sampling(1))):
        pass


@dataclass
class Waiting:
    """A prefill that stands still, and a decode that waits for it."""

    prefill: SimEngine
    decode: SimEngine
    ticket: KvTicket
    prefilling: asyncio.Task[object]
    steps: list[Step | Exception]

    async def outcome(self) -> Step | Exception:
        await until(lambda: bool(self.steps))
        return self.steps[0]


@asynccontextmanager
async def waiting(prefilling: SimConfig = STALLING) -> AsyncIterator[Waiting]:
    prefill, decode = sim_engine(prefilling), sim_engine(CONFIG)
    async with started(prefill), started(decode):
        await first(prefill)
        announced: list[KvTicket] = []
        task = asyncio.create_task(
            prefill.prefill_announced(ask("p"), lambda ticket, _: announced.append(ticket))
        )
        await until(lambda: bool(announced))
        steps: list[Step | Exception] = []
        decode.submit(ask("d"), announced[0], steps.append)
        await until(lambda: decode.load().running == 1)
        assert decode.load().used_blocks == 3  # it has made room
        yield Waiting(prefill, decode, announced[0], task, steps)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not decode.load().used_blocks)


async def cancelled(pair: Waiting) -> None:
    pair.prefilling.cancel()


async def given_back(pair: Waiting) -> None:
    assert await pair.prefill.release(pair.ticket.ticket_id)
    with pytest.raises(TicketError):
        await pair.prefilling


async def closed(pair: Waiting) -> None:
    await pair.prefill.aclose()
    with pytest.raises(EngineError):
        await pair.prefilling


@pytest.mark.parametrize("ending", [cancelled, given_back, closed])
async def test_decode_hears_of_it(ending: Callable[[Waiting], Coroutine[Any, Any, None]]) -> None:
    async with waiting() as pair:
        await ending(pair)
        assert isinstance(await pair.outcome(), (TicketError, TransferError))
        assert not pair.prefill.load().used_blocks


async def test_decode_waits_no_longer_than_it_is_told() -> None:
    """A prefill worker that stands still says nothing, and its ticket ends in time."""
    async with waiting(replace(STALLING, handoff_wait_seconds=0.3)) as pair:
        error = await pair.outcome()
        assert isinstance(error, TransferError)
        assert "not computed within" in str(error)


async def test_a_caller_who_leaves_is_not_kept() -> None:
    async with waiting() as pair:
        assert pair.decode.cancel("d")
        await until(lambda: not pair.decode.load().used_blocks)
        assert not pair.steps
        assert not pair.prefilling.done()


@pytest.mark.parametrize("turns", range(4))
async def test_a_caller_who_leaves_at_once_is_not_kept(turns: int) -> None:
    async with waiting() as pair:
        pair.decode.submit(ask("again"), pair.ticket, pair.steps.append)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert pair.decode.cancel("again")
        await until(lambda: pair.decode.load().used_blocks == 3)
        assert not pair.steps
        assert pair.decode.cancel("d")


async def test_decode_closes_while_it_waits() -> None:
    async with waiting() as pair:
        await pair.decode.aclose()
        assert isinstance(await pair.outcome(), EngineError)


async def test_others_decode_meanwhile() -> None:
    async with waiting() as pair:
        other = [t async for s in pair.decode.generate(ask("o")) for t in s.token_ids]
        assert other == expected(MODEL, PROMPT, 12)
