"""One suite for every engine: what `kvmesh.engine.base` promises. See `EngineRig`."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import pytest
import pytest_asyncio

from kvmesh.engine.base import (
    AsyncEngine,
    EngineRequest,
    Finish,
    KvEventSource,
    Prefilled,
    PrefillEngine,
    ResumeEngine,
    Step,
    StepEngine,
)
from kvmesh.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    TicketError,
    TransferError,
)
from kvmesh.kv.blocks import block_hashes
from kvmesh.testing.engine import EngineRig, Pair, Started
from kvmesh.testing.rigs import LOGITS, RIGS, SLOW, STEPPING
from kvmesh.types import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    FinishReason,
    KvEvent,
    KvTicket,
    Sampling,
    TokenLogprob,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

_ids = itertools.count()


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RIGS],
)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[EngineRig]:
    async with RIGS[request.param]() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def single(rig: EngineRig) -> AsyncIterator[Started]:
    async with rig.single() as lent:
        yield lent
        await idle(lent.engine)


@pytest_asyncio.fixture(loop_scope="module")
async def pair(rig: EngineRig) -> AsyncIterator[Pair]:
    async with rig.pair() as lent:
        assert isinstance(lent.prefill.engine, PrefillEngine)
        assert isinstance(lent.decode.engine, ResumeEngine)
        yield lent
        await idle(lent.prefill.engine)
        await idle(lent.decode.engine)


def ask(prompt: Sequence[int], max_tokens: int | None = 8, **sampling: object) -> EngineRequest:
    knobs = Sampling(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(f"request-{next(_ids)}", prompt, replace(knobs, **sampling))  # type: ignore[arg-type]


async def collect(steps: AsyncIterator[Step]) -> tuple[list[int], Finish]:
    """Return all tokens and the end; there is exactly one, and nothing comes after it."""
    tokens: list[int] = []
    finish = None
    async for step in steps:
        assert finish is None, "a step after the terminal one"
        tokens.extend(step.token_ids)
        finish = step.finish
    assert finish is not None, "no terminal step"
    return tokens, finish


async def generate(lent: Started, request: EngineRequest) -> tuple[list[int], Finish]:
    return await collect(lent.engine.generate(request))


async def prefill(lent: Started, request: EngineRequest) -> Prefilled:
    assert isinstance(lent.engine, PrefillEngine)
    return await lent.engine.prefill(request)


async def prefill_ticket(lent: Started, request: EngineRequest) -> KvTicket:
    prefilled = await prefill(lent, request)
    assert prefilled.finish is None
    assert prefilled.ticket is not None
    return prefilled.ticket


def resume(lent: Started, request: EngineRequest, ticket: KvTicket) -> AsyncIterator[Step]:
    assert isinstance(lent.engine, ResumeEngine)
    return lent.engine.resume(request, ticket)


async def release(lent: Started, ticket: KvTicket) -> bool:
    assert isinstance(lent.engine, PrefillEngine)
    return await lent.engine.release(ticket.ticket_id)


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine holds nothing for anybody."""

    def held() -> int:
        load = engine.load()
        return load.running + load.waiting + load.used_blocks + load.ticket_blocks

    await until(lambda: not held(), lambda: f"still busy: {engine.load()}")


async def until(condition: Callable[[], bool], why: Callable[[], str]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(why())


class TestGenerate:
    async def test_ends_once_after_max_tokens(self, rig: EngineRig, single: Started) -> None:
        tokens, finish = await generate(single, ask(rig.prompt(9), 7, ignore_eos=True))
        assert len(tokens) == 7
        assert finish.reason is FinishReason.LENGTH
        assert finish.stop_token_id is None
        assert all(0 <= token < single.info.vocab_size for token in tokens)

    @pytest.mark.parametrize("length", [1, 2])
    async def test_shortest_prompts(self, rig: EngineRig, single: Started, length: int) -> None:
        tokens, _ = await generate(single, ask(rig.prompt(length), 3, ignore_eos=True))
        assert len(tokens) == 3

    async def test_one_token(self, rig: EngineRig, single: Started) -> None:
        several, _ = await generate(single, ask(rig.prompt(9), 3, ignore_eos=True))
        tokens, finish = await generate(single, ask(rig.prompt(9), 1, ignore_eos=True))
        assert tokens == several[:1]
        assert finish.reason is FinishReason.LENGTH

    async def test_greedy_answers_repeat(self, rig: EngineRig, single: Started) -> None:
        first = await generate(single, ask(rig.prompt(21, 1), 8))
        again = await generate(single, ask(rig.prompt(21, 1), 8))
        other = await generate(single, ask(rig.prompt(21, 2), 8))
        assert first[0] == again[0]
        assert first[0] != other[0]

    async def test_stop_token_is_told_and_counted(self, rig: EngineRig, single: Started) -> None:
        free, _ = await generate(single, ask(rig.prompt(9), 12, ignore_eos=True))
        at = next(at for at in range(1, 12) if free[at] not in free[:at])
        request = ask(rig.prompt(9), 12, ignore_eos=True, stop_token_ids=(free[at],))
        tokens, finish = await generate(single, request)
        assert tokens == free[: at + 1]
        assert finish.reason is FinishReason.STOP
        assert finish.stop_token_id == free[at]

    async def test_min_tokens_come_before_a_stop(self, rig: EngineRig, single: Started) -> None:
        free, _ = await generate(single, ask(rig.prompt(9), 8, ignore_eos=True))
        request = ask(rig.prompt(9), 8, min_tokens=5, stop_token_ids=(free[0],))
        tokens, finish = await generate(single, request)
        assert len(tokens) > 5
        assert free[0] not in tokens[:5]
        assert finish.reason in FinishReason

    async def test_seeded_samples_repeat(self, rig: EngineRig, single: Started) -> None:
        hot = {"temperature": 1.0, "ignore_eos": True}
        one = await generate(single, ask(rig.prompt(9), 8, seed=1, **hot))
        again = await generate(single, ask(rig.prompt(9), 8, seed=1, **hot))
        two = await generate(single, ask(rig.prompt(9), 8, seed=2, **hot))
        assert one[0] == again[0]
        assert one[0] != two[0]

    async def test_concurrent_requests_do_not_mix(self, rig: EngineRig, single: Started) -> None:
        requests = [ask(rig.prompt(5 + 7 * number, number), 10) for number in range(4)]
        alone = [await generate(single, replace(request)) for request in requests]
        again = [replace(request, request_id=request.request_id + "-b") for request in requests]
        together = await asyncio.gather(*(generate(single, request) for request in again))
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]

    async def test_closing_the_iterator_frees_all(self, rig: EngineRig, single: Started) -> None:
        request = ask(rig.prompt(9), 200, ignore_eos=True)
        steps = cast(AsyncGenerator[Step, None], single.engine.generate(request))
        async with aclosing(steps):
            await anext(steps)
            assert single.engine.load().running == 1
        await idle(single.engine)

    async def test_cancelling_the_task_frees_all(self, rig: EngineRig, single: Started) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in single.engine.generate(ask(rig.prompt(9), 200, ignore_eos=True)):
                begun.set()

        reading = asyncio.create_task(read())
        await begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await idle(single.engine)

    async def test_cached_prefix_is_told(self, rig: EngineRig, single: Started) -> None:
        prompt = rig.prompt(3 * single.info.block_size + 1, 77)
        await generate(single, ask(prompt, 2))
        _, finish = await generate(single, ask(prompt, 2))
        assert finish.cached_tokens == 3 * single.info.block_size


class TestRefusals:
    async def refused(self, lent: Started, request: EngineRequest) -> InvalidRequestError:
        with pytest.raises(InvalidRequestError) as caught:
            await generate(lent, request)
        assert caught.value.field
        await idle(lent.engine)
        return caught.value

    async def test_empty_prompt(self, single: Started) -> None:
        await self.refused(single, ask([]))

    async def test_id_outside_of_the_vocabulary(self, rig: EngineRig, single: Started) -> None:
        await self.refused(single, ask([*rig.prompt(3), single.info.vocab_size]))

    async def test_negative_id(self, rig: EngineRig, single: Started) -> None:
        await self.refused(single, ask([-1, *rig.prompt(3)]))

    @pytest.mark.parametrize("token_id", [0, 1], ids=["first", "second"])
    async def test_stop_token_outside_of_the_vocabulary(
        self, rig: EngineRig, single: Started, token_id: int
    ) -> None:
        outside = single.info.vocab_size + token_id
        error = await self.refused(single, ask(rig.prompt(3), stop_token_ids=(1, outside)))
        assert error.field == "stop_token_ids"
        assert str(outside) in error.message

    async def test_bias_outside_of_the_vocabulary(self, rig: EngineRig, single: Started) -> None:
        outside = ((single.info.vocab_size, 5.0),)
        error = await self.refused(single, ask(rig.prompt(3), logit_bias=outside))
        assert error.field == "logit_bias"

    async def test_prompt_over_the_context(self, rig: EngineRig, single: Started) -> None:
        error = await self.refused(single, ask(rig.prompt(single.info.context_length + 1), 1))
        assert isinstance(error, ContextLengthError)

    async def test_completion_over_the_context(self, rig: EngineRig, single: Started) -> None:
        error = await self.refused(single, ask(rig.prompt(9), single.info.context_length))
        assert isinstance(error, ContextLengthError)


class TestHandOff:
    async def test_equals_generate_at_block_edges(self, rig: EngineRig, pair: Pair) -> None:
        size = pair.decode.info.block_size
        for length in (1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 1):
            prompt = rig.prompt(length, 100 + length)
            prefilled = await prefill(pair.prefill, ask(prompt, 10, ignore_eos=True))
            ticket = prefilled.ticket
            assert ticket is not None
            assert ticket.prompt_tokens == length
            assert tuple(prefilled.first_token_ids) == ticket.first_token_ids
            request = ask(prompt, 10, ignore_eos=True)
            tokens, finish = await collect(resume(pair.decode, request, ticket))
            if pair.decode.info.continues_first_token:
                tokens = [*ticket.first_token_ids, *tokens]
            whole, _ = await generate(pair.decode, ask(prompt, 10, ignore_eos=True))
            assert tokens == whole, f"prompt of {length} tokens"
            assert finish.reason is FinishReason.LENGTH
            await idle(pair.prefill.engine)

    async def test_moves_bytes_once(self, rig: EngineRig, pair: Pair) -> None:
        before = pair.decode.engine.load().received_bytes
        prompt = rig.prompt(3 * pair.decode.info.block_size + 1, 21)
        ticket = await prefill_ticket(pair.prefill, ask(prompt))
        held = pair.prefill.engine.load()
        assert held.ticket_blocks == ticket.block_count > 0
        assert held.ticket_bytes == ticket.byte_count > 0
        assert held.used_blocks >= held.ticket_blocks
        await collect(resume(pair.decode, ask(prompt), ticket))
        after = pair.decode.engine.load()
        assert 0 < after.received_bytes - before <= ticket.byte_count
        await idle(pair.prefill.engine)

    async def test_many_at_once(self, rig: EngineRig, pair: Pair) -> None:
        async def both(variant: int) -> list[int]:
            prompt = rig.prompt(20 + variant, 200 + variant)
            ticket = await prefill_ticket(pair.prefill, ask(prompt, 6, ignore_eos=True))
            request = ask(prompt, 6, ignore_eos=True)
            tokens, _ = await collect(resume(pair.decode, request, ticket))
            return tokens

        together = await asyncio.gather(*(both(variant) for variant in range(8)))
        for variant, tokens in enumerate(together):
            prompt = rig.prompt(20 + variant, 200 + variant)
            whole, _ = await generate(pair.decode, ask(prompt, 6, ignore_eos=True))
            assert tokens == whole[-len(tokens) :]

    async def test_fingerprints_agree(self, pair: Pair) -> None:
        assert pair.prefill.info.layout_fingerprint == pair.decode.info.layout_fingerprint != ""

    async def test_a_ticket_is_good_once(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 22)
        ticket = await prefill_ticket(pair.prefill, ask(prompt))
        await collect(resume(pair.decode, ask(prompt), ticket))
        with pytest.raises(TicketError):
            await collect(resume(pair.decode, ask(prompt), ticket))

    async def test_the_tickets_tokens_count(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 23)
        ticket = await prefill_ticket(pair.prefill, ask(prompt, 2, ignore_eos=True))
        request = ask(prompt, 2, ignore_eos=True)
        tokens, _ = await collect(resume(pair.decode, request, ticket))
        assert len(tokens) == (1 if pair.decode.info.continues_first_token else 2)

    @pytest.mark.parametrize(
        "change",
        [
            {"lease_expire_time": 1.0},
            {"layout_fingerprint": "another"},
            {"epoch": "0" * 32},
            {"engine": "another"},
            {"backend": "another"},
            {"prompt_tokens": 3},
            {"engine_params": b"\xff\x00nonsense"},
        ],
        ids=lambda change: next(iter(change)),
    )
    async def test_wrong_tickets_are_refused(
        self, rig: EngineRig, pair: Pair, change: dict[str, object]
    ) -> None:
        prompt = rig.prompt(19, 24)
        ticket = await prefill_ticket(pair.prefill, ask(prompt))
        before = pair.decode.engine.load()
        wrong = replace(ticket, **change)  # type: ignore[arg-type]
        with pytest.raises(TicketError):
            await collect(resume(pair.decode, ask(prompt), wrong))
        await idle(pair.decode.engine)
        assert pair.decode.engine.load().received_bytes == before.received_bytes
        assert await release(pair.prefill, ticket)

    async def test_release_frees_and_repeats(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 25)
        ticket = await prefill_ticket(pair.prefill, ask(prompt))
        assert await release(pair.prefill, ticket)
        await idle(pair.prefill.engine)
        assert not await release(pair.prefill, ticket)
        with pytest.raises((TicketError, TransferError)):
            await collect(resume(pair.decode, ask(prompt), ticket))

    async def test_release_of_the_unknown(self, pair: Pair) -> None:
        assert isinstance(pair.prefill.engine, PrefillEngine)
        assert not await pair.prefill.engine.release("never-was")

    async def test_prefill_of_one_token_is_all(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 26)
        whole, _ = await generate(pair.decode, ask(prompt, 1, ignore_eos=True))
        prefilled = await prefill(pair.prefill, ask(prompt, 1, ignore_eos=True))
        assert prefilled.ticket is None
        assert prefilled.finish is not None
        assert prefilled.finish.reason is FinishReason.LENGTH
        assert list(prefilled.first_token_ids) == whole

    async def test_prefill_that_samples_a_stop_is_all(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 27)
        whole, _ = await generate(pair.decode, ask(prompt, 1, ignore_eos=True))
        prefilled = await prefill(pair.prefill, ask(prompt, 9, stop_token_ids=(whole[0],)))
        assert prefilled.ticket is None
        assert prefilled.finish is not None
        assert prefilled.finish.reason is FinishReason.STOP
        assert prefilled.finish.stop_token_id == whole[0]

    async def test_cancelled_prefill_holds_nothing(self, rig: EngineRig, pair: Pair) -> None:
        computing = asyncio.create_task(prefill(pair.prefill, ask(rig.prompt(300, 28))))
        await asyncio.sleep(0)
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await computing
        await idle(pair.prefill.engine)

    async def test_closing_a_resume_frees_all(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 29)
        ticket = await prefill_ticket(pair.prefill, ask(prompt, 200, ignore_eos=True))
        request = ask(prompt, 200, ignore_eos=True)
        steps = cast(AsyncGenerator[Step, None], resume(pair.decode, request, ticket))
        async with aclosing(steps):
            await anext(steps)
        await idle(pair.decode.engine)
        await idle(pair.prefill.engine)


class TestKvEvents:
    async def test_snapshot_and_events_agree(self, rig: EngineRig, single: Started) -> None:
        source = single.engine
        assert isinstance(source, KvEventSource)
        seen: list[KvEvent] = []
        known = set(source.snapshot())
        end = source.subscribe(seen.append)
        prompt = rig.prompt(3 * single.info.block_size + 1, 30)
        hashes = block_hashes(prompt, single.info.block_size, single.info.model)
        await generate(single, ask(prompt, 2))
        await until(lambda: set(hashes) <= set(source.snapshot()), lambda: "blocks not cached")
        assert list(source.snapshot()).index(hashes[0]) < list(source.snapshot()).index(hashes[-1])
        assert apply(known, seen) == set(source.snapshot())
        end()
        before = len(seen)
        await generate(single, ask(rig.prompt(3 * single.info.block_size + 1, 31), 2))
        assert len(seen) == before


def apply(known: set[int], events: Sequence[KvEvent]) -> set[int]:
    for event in events:
        match event:
            case BlocksStored(block_hashes=hashes):
                known = known | set(hashes)
            case BlocksRemoved(block_hashes=hashes):
                known = known - set(hashes)
            case BlocksCleared():
                known = set()
    return known


@pytest.mark.parametrize("rig", sorted(STEPPING), indirect=True)
class TestSteps:
    @pytest.fixture
    def stepper(self, single: Started) -> StepEngine:
        assert isinstance(single.engine, StepEngine)
        return single.engine

    async def test_a_sink_gets_what_generate_yields(
        self, rig: EngineRig, single: Started, stepper: StepEngine
    ) -> None:
        items: asyncio.Queue[Step | Exception] = asyncio.Queue()
        stepper.submit(ask(rig.prompt(9), 7), None, items.put_nowait)
        tokens, finish = await collect(drain(items))
        assert items.empty()
        whole, other = await generate(single, ask(rig.prompt(9), 7))
        assert tokens == whole
        assert finish.reason is other.reason

    async def test_cancel_silences_and_frees(
        self, rig: EngineRig, single: Started, stepper: StepEngine
    ) -> None:
        items: asyncio.Queue[Step | Exception] = asyncio.Queue()
        request = ask(rig.prompt(9), 200, ignore_eos=True)
        stepper.submit(request, None, items.put_nowait)
        await items.get()
        assert stepper.cancel(request.request_id)
        had = items.qsize()
        assert not stepper.cancel(request.request_id)
        await idle(single.engine)
        assert items.qsize() == had

    async def test_bad_requests_are_refused_at_once(
        self, single: Started, stepper: StepEngine
    ) -> None:
        with pytest.raises(InvalidRequestError):
            stepper.submit(ask([]), None, lambda _: None)


async def drain(items: asyncio.Queue[Step | Exception]) -> AsyncIterator[Step]:
    while True:
        item = await items.get()
        if isinstance(item, Exception):
            raise item
        yield item
        if item.finish is not None:
            return


def with_marks(names: frozenset[str]) -> list[object]:
    return [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in sorted(names)]


@pytest.mark.parametrize("rig", with_marks(LOGITS), indirect=True)
class TestLogits:
    async def test_greedy_picks_the_likeliest(self, rig: EngineRig, single: Started) -> None:
        plain, _ = await generate(single, ask(rig.prompt(9), 6, ignore_eos=True))
        steps = single.engine.generate(ask(rig.prompt(9), 6, ignore_eos=True, logprobs=3))
        tokens, rows = await measured(steps)
        assert tokens == plain
        for token, row in zip(tokens, rows, strict=True):
            values = [value for _, value in row.top]
            assert row.top[0] == (token, row.logprob)
            assert values == sorted(values, reverse=True)
            assert len(values) == 3
            assert all(-9999 <= value <= 0 for value in values)

    async def test_the_sampled_tokens_alone(self, rig: EngineRig, single: Started) -> None:
        _, three = await measured(single.engine.generate(ask(rig.prompt(9), 4, logprobs=3)))
        _, none = await measured(single.engine.generate(ask(rig.prompt(9), 4, logprobs=0)))
        assert [row.top for row in none] == [()] * len(none)
        assert [row.logprob for row in none] == pytest.approx(
            [row.logprob for row in three], abs=1e-3
        )

    async def test_none_unless_asked_for(self, rig: EngineRig, single: Started) -> None:
        async for step in single.engine.generate(ask(rig.prompt(9), 3)):
            assert step.logprobs is None

    async def test_a_bias_decides(self, rig: EngineRig, single: Started) -> None:
        plain, _ = await generate(single, ask(rig.prompt(9), 4, ignore_eos=True))
        wanted = next(token for token in range(10, 30) if token not in plain)
        forced = ask(rig.prompt(9), 4, ignore_eos=True, logit_bias=((wanted, 100.0),))
        assert (await generate(single, forced))[0] == [wanted] * 4
        barred = ask(rig.prompt(9), 4, ignore_eos=True, logit_bias=((plain[0], -100.0),))
        assert plain[0] not in (await generate(single, barred))[0]

    async def test_a_bias_leaves_logprobs_alone(self, rig: EngineRig, single: Started) -> None:
        # Each token still is as likely as the model has it.
        _, plain = await measured(single.engine.generate(ask(rig.prompt(9), 1, logprobs=2)))
        second, value = plain[0].top[1]
        forced = ask(rig.prompt(9), 1, logprobs=2, logit_bias=((second, 100.0),))
        tokens, rows = await measured(single.engine.generate(forced))
        assert tokens == [second]
        assert rows[0].logprob == pytest.approx(value, abs=1e-3)
        assert [token for token, _ in rows[0].top] == [token for token, _ in plain[0].top]

    async def test_a_hand_off_changes_no_logprob(self, rig: EngineRig, pair: Pair) -> None:
        def request() -> EngineRequest:
            return ask(rig.prompt(19, 40), 6, ignore_eos=True, logprobs=3)

        tokens, rows = await measured(pair.decode.engine.generate(request()))
        prefilled = await prefill(pair.prefill, request())
        assert prefilled.ticket is not None
        assert prefilled.logprobs is not None
        first, of_first = list(prefilled.first_token_ids), list(prefilled.logprobs)
        assert first == tokens[: len(first)]
        assert_alike(of_first, rows[: len(first)])
        rest, of_rest = await measured(resume(pair.decode, request(), prefilled.ticket))
        if pair.decode.info.continues_first_token:
            rest, of_rest = first + rest, of_first + of_rest
        assert rest == tokens
        assert_alike(of_rest, rows)

    async def test_a_prefill_that_is_all_has_logprobs(self, rig: EngineRig, pair: Pair) -> None:
        prefilled = await prefill(pair.prefill, ask(rig.prompt(19, 41), 1, logprobs=1))
        assert prefilled.finish is not None
        assert prefilled.logprobs is not None
        assert [row.top[0][0] for row in prefilled.logprobs] == list(prefilled.first_token_ids)


async def measured(steps: AsyncIterator[Step]) -> tuple[list[int], list[TokenLogprob]]:
    """Return all tokens and how likely they were: each step has as many of both."""
    tokens: list[int] = []
    rows: list[TokenLogprob] = []
    async for step in steps:
        assert len(step.logprobs or ()) == len(step.token_ids)
        tokens.extend(step.token_ids)
        rows.extend(step.logprobs or ())
    return tokens, rows


def assert_alike(rows: Sequence[TokenLogprob], others: Sequence[TokenLogprob]) -> None:
    for row, other in zip(rows, others, strict=True):
        assert row.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in row.top] == [token for token, _ in other.top]
        assert [v for _, v in row.top] == pytest.approx([v for _, v in other.top], abs=1e-3)


@pytest.mark.parametrize("rig", sorted(set(RIGS) - LOGITS), indirect=True)
class TestNoLogits:
    @pytest.mark.parametrize(
        ("field", "value"), [("logprobs", 0), ("logprobs", 3), ("logit_bias", ((1, 1.0),))]
    )
    async def test_what_needs_logits_is_refused(
        self, rig: EngineRig, single: Started, field: str, value: object
    ) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await generate(single, ask(rig.prompt(3), **{field: value}))
        assert caught.value.field == field
        await idle(single.engine)


class TestLife:
    async def test_a_started_engine_is_well(self, single: Started) -> None:
        single.engine.check()
        load = single.engine.load()
        assert load.total_blocks == single.info.total_blocks > 0
        assert (load.running, load.waiting) == (0, 0)

    async def test_close_fails_what_runs_and_repeats(self, rig: EngineRig) -> None:
        engine = rig.fresh()
        await engine.start()
        steps = engine.generate(ask(rig.prompt(9), 200, ignore_eos=True))
        await anext(steps)
        await engine.aclose()
        with pytest.raises(EngineError):
            await collect(steps)
        with pytest.raises(EngineError):
            engine.check()
        with pytest.raises(EngineError):
            await collect(engine.generate(ask(rig.prompt(9))))
        await engine.aclose()

    async def test_close_without_a_start(self, rig: EngineRig) -> None:
        engine = rig.fresh()
        await engine.aclose()
        await engine.aclose()

    async def test_close_after_a_failed_start(self, rig: EngineRig) -> None:
        engine = rig.broken()
        with pytest.raises(EngineError):
            await engine.start()
        with pytest.raises(EngineError):
            engine.check()
        await engine.aclose()
        await engine.aclose()
