"""The simulated engine gives the right tokens however it is squeezed."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.base import EngineRequest, Step
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.engine.sim.latency import Latency
from kvmesh.engine.sim.model import expected
from kvmesh.errors import ContextLengthError, MeshError, OverloadedError
from kvmesh.testing.engine import sim_engine, started
from kvmesh.types import FinishReason, Load, Sampling

FULL_SPEED = SimConfig(block_size=4, total_blocks=64, latency=Latency(speed=0))
MODEL = FULL_SPEED.model("sim-model")

_ids = itertools.count()


def ask(prompt: Sequence[int], max_tokens: int | None, priority: int = 0) -> EngineRequest:
    return EngineRequest(f"r{next(_ids)}", prompt, Sampling(max_tokens), priority=priority)


async def tokens_of(steps: AsyncIterator[Step]) -> list[int]:
    return [token async for step in steps for token in step.token_ids]


async def run(engine: SimEngine, prompt: Sequence[int], max_tokens: int) -> list[int]:
    return await tokens_of(engine.generate(ask(prompt, max_tokens)))


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=30),  # few ids, so prefixes are shared
        st.integers(1, 30),
        st.integers(0, 2),  # priority
        st.integers(0, 12),  # turns of the loop before it comes
    ),
    min_size=1,
    max_size=12,
)


@given(requests, st.integers(15, 24), st.integers(1, 40), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_answers_are_exact_under_preemption(
    wanted: list[tuple[list[int], int, int, int]], blocks: int, batch_tokens: int, batch: int
) -> None:
    config = replace(
        FULL_SPEED, total_blocks=blocks, max_batch_tokens=batch_tokens, max_batch=batch
    )

    async def one(
        engine: SimEngine, prompt: list[int], count: int, priority: int, turns: int
    ) -> list[int]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await tokens_of(engine.generate(ask(prompt, count, priority)))

    async def answer() -> list[list[int]]:
        async with started(engine := sim_engine(config)):
            answers = await asyncio.gather(*(one(engine, *each) for each in wanted))
            assert engine.load().used_blocks == 0
            return answers

    assert asyncio.run(answer()) == [expected(MODEL, *each[:2]) for each in wanted]


async def test_the_pool_above_does_preempt() -> None:
    config = replace(FULL_SPEED, total_blocks=15)
    async with started(engine := sim_engine(config)):
        wanted = [([number, 1, 2], 30) for number in range(6)]
        answers = await asyncio.gather(*(run(engine, *each) for each in wanted))
        assert answers == [expected(MODEL, *each) for each in wanted]
        assert engine.preemptions > 0


async def test_no_leak_after_random_requests_and_cancels() -> None:
    rng = random.Random(5)
    config = replace(FULL_SPEED, total_blocks=80, max_batch=16, max_batch_tokens=24)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(started(prefill := sim_engine(config)))
        await stack.enter_async_context(started(decode := sim_engine(config)))
        outcomes: list[str] = []

        async def one() -> None:
            prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
            count = rng.randrange(1, 20)
            if rng.random() < 0.4:
                tokens = await run(rng.choice((prefill, decode)), prompt, count)
            else:
                tokens = await handed_off(prefill, decode, prompt, count)
            assert tokens == expected(MODEL, prompt, count)
            outcomes.append("whole")

        async def maybe_cancelled() -> None:
            task = asyncio.create_task(one())
            if rng.random() < 0.4:
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                outcomes.append("cancelled")
            else:
                task.result()

        gate = asyncio.Semaphore(40)

        async def gated() -> None:
            async with gate:
                await maybe_cancelled()

        await asyncio.gather(*(gated() for _ in range(500)))
        assert outcomes.count("whole") > 250
        assert outcomes.count("cancelled") > 50
        empty = Load(total_blocks=80)
        assert replace(prefill.load(), received_bytes=0) == empty
        assert replace(decode.load(), received_bytes=0, received_seconds=0.0) == empty


async def handed_off(
    prefill: SimEngine, decode: SimEngine, prompt: list[int], count: int
) -> list[int]:
    prefilled = await prefill.prefill(ask(prompt, count))
    if prefilled.ticket is None:
        return list(prefilled.first_token_ids)
    try:
        rest = await tokens_of(decode.resume(ask(prompt, count), prefilled.ticket))
    except asyncio.CancelledError:
        await prefill.release(prefilled.ticket.ticket_id)
        raise
    return [*prefilled.first_token_ids, *rest]


async def test_a_full_queue_refuses() -> None:
    config = replace(FULL_SPEED, max_batch=1, max_queue=2)
    async with started(engine := sim_engine(config)):
        steps = engine.generate(ask([1], 100))
        await anext(steps)
        waiting = [asyncio.create_task(run(engine, [number], 3)) for number in (2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as caught:
            await run(engine, [4], 3)
        assert caught.value.retry_after
        await steps.aclose()
        assert await asyncio.gather(*waiting) == [expected(MODEL, [n], 3) for n in (2, 3)]


async def test_smaller_priority_goes_first() -> None:
    config = replace(FULL_SPEED, max_batch=1)
    ended: list[int] = []
    async with started(engine := sim_engine(config)):

        async def one(priority: int) -> None:
            await tokens_of(engine.generate(ask([priority + 5], 3, priority)))
            ended.append(priority)

        await asyncio.gather(*(one(priority) for priority in (3, 1, 2, -1)))
    assert ended == [-1, 1, 2, 3]


async def test_max_tokens_reach_to_the_end_of_the_context() -> None:
    config = replace(FULL_SPEED, context_length=32)
    async with started(engine := sim_engine(config)):
        assert len(await tokens_of(engine.generate(ask([1, 2, 3], None)))) == 29
        assert len(await run(engine, [1, 2, 3], 29)) == 29
        with pytest.raises(ContextLengthError):
            await run(engine, [1, 2, 3], 30)


async def test_a_context_larger_than_the_pool_is_cut() -> None:
    async with started(engine := sim_engine(replace(FULL_SPEED, total_blocks=4))) as lent:
        assert lent.info.context_length == 16
        assert await run(engine, [1, 2, 3], 13) == expected(MODEL, [1, 2, 3], 13)


async def test_eos_ends_unless_ignored() -> None:
    config = replace(FULL_SPEED, eos_probability=0.2)
    model = config.model("sim-model")
    prompt = next([n] for n in itertools.count() if 2 in expected(model, [n], 10)[:9])
    right = expected(model, prompt, 10)
    async with started(engine := sim_engine(config)):
        steps = [step async for step in engine.generate(ask(prompt, 10))]
        assert [token for step in steps for token in step.token_ids] == right[: right.index(2) + 1]
        finish = steps[-1].finish
        assert finish is not None
        assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, None)
        ignoring = EngineRequest("i", prompt, Sampling(10, ignore_eos=True))
        assert await tokens_of(engine.generate(ignoring)) == right
        patient = EngineRequest("p", prompt, Sampling(10, min_tokens=10))
        assert await tokens_of(engine.generate(patient)) == expected(
            model, prompt, 10, banned=frozenset({2})
        )


async def test_a_request_id_runs_once() -> None:
    async with started(engine := sim_engine(FULL_SPEED)):
        request = ask([1], 50)
        steps = engine.generate(request)
        await anext(steps)
        with pytest.raises(MeshError):
            await tokens_of(engine.generate(request))
        await steps.aclose()
        assert await tokens_of(engine.generate(request)) == expected(MODEL, [1], 50)


async def test_steps_take_the_modelled_time() -> None:
    latency = Latency(
        prefill_us_per_token=1000,
        decode_us_per_step=4000,
        decode_us_per_sequence=0,
        decode_us_per_kv_token=0,
        speed=2,
    )
    loop = asyncio.get_running_loop()
    async with started(engine := sim_engine(replace(FULL_SPEED, latency=latency))):
        begun = loop.time()
        assert await run(engine, [1] * 10, 11) == expected(MODEL, [1] * 10, 11)
        assert loop.time() - begun >= (10 * 0.001 + 10 * 0.004) / 2 - 0.001
