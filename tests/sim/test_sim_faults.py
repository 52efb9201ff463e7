"""Faults in the simulated engine end in an error or the right tokens, never in others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvmesh.clock import SystemClock
from kvmesh.engine.base import EngineRequest, Step
from kvmesh.engine.handoff import unpack
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.engine.sim.faults import Faults
from kvmesh.engine.sim.latency import Latency
from kvmesh.engine.sim.model import expected
from kvmesh.errors import EngineError, OverloadedError, TicketError, TransferError
from kvmesh.testing.engine import sim_engine, started
from kvmesh.types import Sampling

CONFIG = SimConfig(block_size=4, total_blocks=16, latency=Latency(speed=0))
MODEL = CONFIG.model("sim-model")
PROMPT = list(range(5, 15))


class SteppedClock(SystemClock):
    """A clock that can be put forward; `wall` stays, as on another machine."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def ask(request_id: str, prompt: list[int] = PROMPT, max_tokens: int = 12) -> EngineRequest:
    return EngineRequest(request_id, prompt, Sampling(max_tokens))


async def generated(engine: SimEngine, request: EngineRequest) -> list[int]:
    return [token async for step in engine.generate(request) for token in step.token_ids]


@asynccontextmanager
async def pair(
    prefill: SimConfig = CONFIG, decode: SimConfig = CONFIG, clock: SystemClock | None = None
) -> AsyncIterator[tuple[SimEngine, SimEngine]]:
    one, two = sim_engine(prefill, clock=clock), sim_engine(decode)
    async with started(one), started(two):
        yield one, two


async def until(condition: Callable[[], bool], turn: float = 0.005) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(turn)
    pytest.fail("it did not come to that")


async def handed_off(prefill: SimEngine, decode: SimEngine) -> list[int]:
    prefilled = await prefill.prefill(ask("p"))
    assert prefilled.ticket is not None
    steps = decode.resume(ask("d"), prefilled.ticket)
    return [*prefilled.first_token_ids, *[t async for step in steps for t in step.token_ids]]


@pytest.mark.parametrize("spoiled", [1, 2, 3])
async def test_spoiled_blocks_are_found(spoiled: int) -> None:
    bad = replace(CONFIG, faults=Faults(spoil_blocks=spoiled))
    async with pair(decode=bad) as (prefill, decode):
        with pytest.raises(TransferError):
            await handed_off(prefill, decode)
        assert decode.load().used_blocks == 0
        assert decode.snapshot() == []
        assert await generated(decode, ask("g")) == expected(MODEL, PROMPT, 12)


async def test_unseen_spoiled_blocks_give_other_tokens() -> None:
    bad = replace(CONFIG, faults=Faults(spoil_blocks=1), verify_content=False)
    async with pair(decode=bad) as (prefill, decode):
        tokens = await handed_off(prefill, decode)
        right = expected(MODEL, PROMPT, 12)
        assert tokens[0] == right[0]  # prefill's own
        assert all(ours != theirs for ours, theirs in zip(tokens[1:], right[1:], strict=True))


@pytest.mark.parametrize("block", [0, 1, 2])
async def test_each_pulled_block_decides(block: int) -> None:
    careless = replace(CONFIG, verify_content=False)
    async with pair(decode=careless) as (prefill, decode):
        prefilled = await prefill.prefill(ask("p"))
        assert prefilled.ticket is not None
        offer = unpack(prefilled.ticket.engine_params)
        prefill.memory.spoil([offer.blocks[block]])
        steps = decode.resume(ask("d"), prefilled.ticket)
        tokens = [token async for step in steps for token in step.token_ids]
        assert tokens[0] != expected(MODEL, PROMPT, 2)[1]


async def test_a_dropped_leases_blocks_are_never_used() -> None:
    bad = replace(CONFIG, faults=Faults(drop_leases=True))
    async with pair(prefill=bad) as (prefill, decode):
        prefilled = await prefill.prefill(ask("p"))
        assert prefilled.ticket is not None
        assert prefill.load().ticket_blocks == 0
        for number in range(8):  # reuse every block
            await generated(prefill, ask(f"x{number}", [100 + number] * 20))
        with pytest.raises(TicketError):
            _ = [step async for step in decode.resume(ask("d"), prefilled.ticket)]
        assert decode.snapshot() == []
        assert decode.load().used_blocks == 0


async def test_a_lease_that_ran_out_unnoticed_still_gives_whole_blocks() -> None:
    clock = SteppedClock()
    async with pair(clock=clock) as (prefill, decode):
        prefilled = await prefill.prefill(ask("p"))
        assert prefilled.ticket is not None
        clock.ahead = CONFIG.lease_seconds  # its timer has not fired: the blocks are there
        steps = decode.resume(ask("d"), prefilled.ticket)
        tokens = [token async for step in steps for token in step.token_ids]
        assert tokens[0] == expected(MODEL, PROMPT, 2)[1]


async def test_an_expired_ticket_is_refused_at_once() -> None:
    async with pair() as (prefill, decode):
        ticket = (await prefill.prefill(ask("p"))).ticket
        assert ticket is not None
        with pytest.raises(TicketError, match="expired"):
            decode.submit(ask("d"), replace(ticket, lease_expire_time=1.0), lambda _: None)


async def test_blocks_of_a_cancelled_pull_are_kept_until_it_ended() -> None:
    async with pair() as (prefill, decode):
        ticket = (await prefill.prefill(ask("p"))).ticket
        assert ticket is not None
        items: list[Step | Exception] = []
        decode.submit(ask("d"), ticket, items.append)
        await until(lambda: decode.load().running == 1, turn=0)
        assert decode.cancel("d")
        assert decode.load().used_blocks > 0
        await until(lambda: decode.load().used_blocks == 0)
        assert not items
        assert prefill.load().ticket_blocks == 0  # pulled, though nobody wants it any more


async def test_leases_run_out() -> None:
    async with pair(prefill=replace(CONFIG, lease_seconds=0.03)) as (prefill, _):
        await asyncio.gather(*(prefill.prefill(ask(f"p{n}", [n] * 9)) for n in range(4)))
        assert prefill.load().ticket_blocks == 12
        await asyncio.sleep(0.01)
        await prefill.prefill(ask("later", [7] * 9))
        await until(lambda: prefill.load().ticket_blocks == 0)
        assert prefill.load().used_blocks == 0


async def test_requests_wait_for_blocks_under_lease() -> None:
    async with pair(prefill=replace(CONFIG, total_blocks=4)) as (prefill, decode):
        prefilled = await prefill.prefill(ask("p", max_tokens=2))
        assert prefilled.ticket is not None
        waiting = asyncio.create_task(generated(prefill, ask("g", [9] * 8, 4)))
        await until(lambda: prefill.load().waiting == 1)
        steps = decode.resume(ask("d", max_tokens=2), prefilled.ticket)
        assert len([step async for step in steps]) == 1
        assert await waiting == expected(MODEL, [9] * 8, 4)


async def test_a_dead_holder_is_a_failed_transfer() -> None:
    async with pair() as (prefill, decode):
        prefilled = await prefill.prefill(ask("p"))
        assert prefilled.ticket is not None
        await prefill.aclose()
        with pytest.raises((TransferError, TicketError)):
            _ = [step async for step in decode.resume(ask("d"), prefilled.ticket)]
        assert decode.load().used_blocks == 0


async def test_a_crash_ends_all_and_the_engine() -> None:
    config = replace(CONFIG, total_blocks=64, faults=Faults(crash_after_steps=5))
    async with started(engine := sim_engine(config)):
        outcomes = await asyncio.gather(
            *(generated(engine, ask(f"r{n}", [n, 1, 2])) for n in range(8)),
            return_exceptions=True,
        )
        assert {type(outcome) for outcome in outcomes} == {EngineError}
        with pytest.raises(EngineError, match="died"):
            engine.check()
        with pytest.raises(EngineError):
            await generated(engine, ask("late"))
        assert engine.load().used_blocks == engine.load().running == engine.load().waiting == 0


async def test_a_stall_ends() -> None:
    faults = Faults(stall_after_steps=3, stall_seconds=0.02)
    async with started(engine := sim_engine(replace(CONFIG, faults=faults))):
        assert await generated(engine, ask("r")) == expected(MODEL, PROMPT, 12)


async def test_a_stall_for_good_can_be_cancelled_and_closed() -> None:
    faults = Faults(stall_after_steps=3)
    async with started(engine := sim_engine(replace(CONFIG, faults=faults))):
        steps = engine.generate(ask("r"))
        for _ in range(3):
            await anext(steps)
        stalled = asyncio.create_task(anext(steps))
        await asyncio.sleep(0.02)
        assert not stalled.done()
        stalled.cancel()
        await asyncio.wait([stalled])
        assert engine.load().used_blocks == 0


async def test_a_slow_start_can_be_cancelled() -> None:
    engine = sim_engine(replace(CONFIG, faults=Faults(slow_start_seconds=60)))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    await engine.aclose()


@pytest.mark.parametrize("kind", ["generate", "prefill", "resume"])
async def test_refusals(kind: str) -> None:
    bad = replace(CONFIG, faults=Faults(refuse=kind))
    async with pair(bad, bad) as (prefill, decode):
        work = generated(decode, ask("r")) if kind == "generate" else handed_off(prefill, decode)
        with pytest.raises(OverloadedError):
            await work


async def test_another_life_on_the_same_seat_refuses_old_tickets() -> None:
    async with started(decode := sim_engine(CONFIG)):
        async with started(old := sim_engine(CONFIG)):
            ticket = (await old.prefill(ask("p"))).ticket
        async with started(sim_engine(CONFIG)):
            assert ticket is not None
            with pytest.raises((TicketError, TransferError)):
                _ = [step async for step in decode.resume(ask("d"), ticket)]


async def test_models_of_other_seeds_hand_nothing_off() -> None:
    async with pair(decode=replace(CONFIG, seed=1)) as (prefill, decode):
        with pytest.raises(TicketError, match="layout"):
            await handed_off(prefill, decode)
