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
from kvmesh.testing.rigs import RIGS, SLOW, STEPPING
from kvmesh.types import (
    LOGPROB_FLOOR,
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

    async def test_a55_what_was_cached_is_known_from_the_first_token_on(
        self, rig: EngineRig, single: Started
    ) -> None:
        prompt = rig.prompt(2 * single.info.block_size + 1, 78)
        await generate(single, ask(prompt, 2))
        for asked, known in ((prompt, 2 * single.info.block_size), (rig.prompt(5, 79), 0)):
            request = ask(asked, 50, ignore_eos=True)
            async with aclosing(single.engine.generate(request)) as steps:
                assert (await anext(steps)).cached_tokens == known
        await idle(single.engine)


class TestRefusals:
    async def refused(self, lent: Started, request: EngineRequest) -> InvalidRequestError:
        with pytest.raises(InvalidRequestError) as caught:
            await generate(lent, request)
        assert caught.value.field
        await idle(lent.engine)
        return caught.value

    async def test_empty_prompt(self, single: Started) -> None:
        await self.refused(single, ask([]))

    @pytest.mark.parametrize("token_id", [-1, 2**40])
    async def test_a44_prompt_ids_that_no_vocabulary_has(
        self, rig: EngineRig, single: Started, token_id: int
    ) -> None:
        error = await self.refused(single, ask([*rig.prompt(3), token_id]))
        assert str(token_id) in error.message

    @pytest.mark.parametrize(
        "field", ["prompt", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"]
    )
    @pytest.mark.parametrize("beyond", [0, 1], ids=["first", "second"])
    async def test_a44_ids_outside_of_the_vocabulary(
        self, rig: EngineRig, single: Started, beyond: int, field: str
    ) -> None:
        bad = single.info.vocab_size + beyond
        error = await self.refused(single, with_id(rig, bad, field))
        assert field in ("prompt", error.field)
        assert str(bad) in error.message

    @pytest.mark.parametrize(
        "field", ["prompt", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"]
    )
    async def test_a44_the_last_id_of_the_vocabulary_is_inside(
        self, rig: EngineRig, single: Started, field: str
    ) -> None:
        last = single.info.vocab_size - 1  # a tokenizer may know fewer
        tokens, _ = await generate(single, with_id(rig, last, field))
        assert tokens

    async def test_what_is_allowed_must_not_all_be_banned(
        self, rig: EngineRig, single: Started
    ) -> None:
        knobs = {"min_tokens": 2, "stop_token_ids": (7,)}
        only = (7, rig.eos)
        error = await self.refused(single, ask(rig.prompt(3), allowed_token_ids=only, **knobs))
        assert error.field == "allowed_token_ids"
        await generate(single, ask(rig.prompt(3), allowed_token_ids=(*only, 8), **knobs))

    async def test_what_is_allowed_must_not_all_be_bad_words(
        self, rig: EngineRig, single: Started
    ) -> None:
        words = ((7,), (9, 8))
        request = ask(rig.prompt(3), allowed_token_ids=(7, 8), bad_words=words)
        assert (await self.refused(single, request)).field == "allowed_token_ids"
        tokens, _ = await generate(
            single, ask(rig.prompt(3), 4, allowed_token_ids=(7, 9), bad_words=words)
        )
        assert tokens == [9] * 4

    async def test_what_only_some_engines_refuse(self, rig: EngineRig, single: Started) -> None:
        refused = ""
        try:
            await generate(single, ask(rig.prompt(3), 2, temperature=100.0))
        except InvalidRequestError as error:
            refused = error.field
        assert refused in {"", "temperature"}
        await idle(single.engine)

    async def test_prompt_over_the_context(self, rig: EngineRig, single: Started) -> None:
        error = await self.refused(single, ask(rig.prompt(single.info.context_length + 1), 1))
        assert isinstance(error, ContextLengthError)

    async def test_completion_over_the_context(self, rig: EngineRig, single: Started) -> None:
        error = await self.refused(single, ask(rig.prompt(9), single.info.context_length))
        assert isinstance(error, ContextLengthError)


def with_id(rig: EngineRig, token_id: int, field: str) -> EngineRequest:
    """Return a request that has a token id in a field."""
    values: dict[str, object] = {
        "stop_token_ids": (1, token_id),
        "logit_bias": ((1, 1.0), (token_id, 5.0)),
        "allowed_token_ids": (1, token_id),
        "bad_words": ((1,), (token_id, 1)),
    }
    if field == "prompt":
        return ask([*rig.prompt(3), token_id], 2)
    return ask(rig.prompt(3), 2, **{field: values[field]})


class TestBadWords:
    async def test_one_token_never_comes(self, rig: EngineRig, single: Started) -> None:
        prompt = rig.prompt(9, 60)
        free, _ = await generate(single, ask(prompt, 8, ignore_eos=True))
        words = tuple((token,) for token in dict.fromkeys(free[:3]))
        tokens, _ = await generate(single, ask(prompt, 8, ignore_eos=True, bad_words=words))
        assert len(tokens) == 8
        assert not {token for (token,) in words} & set(tokens)

    @pytest.mark.parametrize("at", [0, 1, 4])
    @pytest.mark.parametrize("length", [2, 3])
    async def test_a_sequence_is_not_completed(
        self, rig: EngineRig, single: Started, at: int, length: int
    ) -> None:
        prompt = rig.prompt(9, 61)
        free, _ = await generate(single, ask(prompt, 8, ignore_eos=True))
        word = tuple(free[at : at + length])
        tokens, _ = await generate(single, ask(prompt, 8, ignore_eos=True, bad_words=(word,)))
        assert not has(tokens, word)
        end = next(n for n in range(8) if has(free[: n + 1], word))  # it may come about sooner
        assert tokens[:end] == free[:end]
        assert tokens[end] != free[end]

    async def test_the_prompt_does_not_begin_a_sequence(
        self, rig: EngineRig, single: Started
    ) -> None:
        prompt = rig.prompt(9, 62)
        free, _ = await generate(single, ask(prompt, 6, ignore_eos=True))
        words = ((prompt[-1], free[0]), (*prompt[-2:], *free[:2]))
        request = ask(prompt, 6, ignore_eos=True, bad_words=words)
        tokens, _ = await generate(single, request)
        assert tokens[:2] == free[:2]

    async def test_the_models_end_may_be_one(self, rig: EngineRig, single: Started) -> None:
        knobs = {"logit_bias": ((rig.eos, 100.0),), "bad_words": ((rig.eos,),)}
        tokens, finish = await generate(single, ask(rig.prompt(9, 63), 6, **knobs))
        assert (len(tokens), finish.reason) == (6, FinishReason.LENGTH)
        assert rig.eos not in tokens

    async def test_bias_and_temperature_do_not_bring_one_back(
        self, rig: EngineRig, single: Started
    ) -> None:
        words = ((11,), (12, 13))
        knobs = {"logit_bias": ((11, 100.0), (12, 60.0), (13, 60.0)), "temperature": 1.0}
        request = ask(rig.prompt(9, 64), 12, ignore_eos=True, seed=3, bad_words=words, **knobs)
        tokens, _ = await generate(single, request)
        assert set(tokens) <= {12, 13}
        assert not has(tokens, (12, 13))

    async def test_a_batch_keeps_each_requests_own(self, rig: EngineRig, single: Started) -> None:
        prompt = rig.prompt(9, 65)
        free, _ = await generate(single, ask(prompt, 8, ignore_eos=True))
        choices: list[tuple[tuple[int, ...], ...]] = [(), ((free[0],),), ((free[1],),), ()]
        asked = [ask(prompt, 8, ignore_eos=True, bad_words=words) for words in choices]
        alone = [
            (await generate(single, replace(one, request_id=f"x-{n}")))[0]
            for n, one in enumerate(asked)
        ]
        together = await asyncio.gather(*(generate(single, one) for one in asked))
        assert [tokens for tokens, _ in together] == alone
        assert alone[0] == alone[3] == free

    @pytest.mark.parametrize("length", [1, 2, 3])
    async def test_the_token_of_prefill_counts(
        self, rig: EngineRig, pair: Pair, length: int
    ) -> None:
        prompt = rig.prompt(19, 66)
        free, _ = await generate(pair.decode, ask(prompt, 8, ignore_eos=True))
        word = tuple(free[:length])
        knobs = {"ignore_eos": True, "bad_words": (word,)}
        whole, _ = await generate(pair.decode, ask(prompt, 8, **knobs))
        prefilled = await prefill(pair.prefill, ask(prompt, 8, **knobs))
        first, ticket = list(prefilled.first_token_ids), prefilled.ticket
        assert ticket is not None
        assert first == whole[:1]
        rest, _ = await collect(resume(pair.decode, ask(prompt, 8, **knobs), ticket))
        if pair.decode.info.continues_first_token:
            rest = first + rest
        assert rest == whole
        assert not has(rest, word)


def has(tokens: Sequence[int], word: tuple[int, ...]) -> bool:
    """Return whether a sequence is in some tokens."""
    return any(tuple(tokens[at : at + len(word)]) == word for at in range(len(tokens)))


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

    async def test_a04_prefill_that_samples_a_stop_is_all(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 27)
        whole, _ = await generate(pair.decode, ask(prompt, 1, ignore_eos=True))
        prefilled = await prefill(pair.prefill, ask(prompt, 9, stop_token_ids=(whole[0],)))
        assert prefilled.ticket is None
        assert prefilled.finish is not None
        assert prefilled.finish.reason is FinishReason.STOP
        assert prefilled.finish.stop_token_id == whole[0]
        assert list(prefilled.first_token_ids) == whole

    @pytest.mark.parametrize("own", [False, True], ids=["the-models-end", "also-a-stop-token"])
    @pytest.mark.parametrize("by", ["logit_bias", "allowed_token_ids"])
    async def test_a04_prefill_that_samples_the_end_is_all(
        self, rig: EngineRig, pair: Pair, by: str, own: bool
    ) -> None:
        prompt, stops = rig.prompt(19, 32), (rig.eos,) if own else ()
        forced = {"logit_bias": ((rig.eos, 100.0),), "allowed_token_ids": (rig.eos,)}
        request = ask(prompt, 9, stop_token_ids=stops, **{by: forced[by]})
        tokens, finish = await generate(pair.decode, request)
        assert tokens == [rig.eos]
        prefilled = await prefill(pair.prefill, replace(request, request_id=f"r-{next(_ids)}"))
        assert prefilled.ticket is None
        assert list(prefilled.first_token_ids) == [rig.eos]
        for end in (finish, prefilled.finish):
            assert end is not None
            assert end.reason is FinishReason.STOP
            assert end.stop_token_id == (rig.eos if own else None)

    async def test_a35_prefill_picks_one_token_and_decode_the_rest(
        self, rig: EngineRig, pair: Pair
    ) -> None:
        prompt = rig.prompt(19, 33)
        free, _ = await generate(pair.decode, ask(prompt, 12, ignore_eos=True))
        knobs = {"min_tokens": 5, "stop_token_ids": (free[0], free[3]), "logprobs": 5}
        tokens, finish = await generate(pair.decode, ask(prompt, 12, **knobs))
        assert len(tokens) > 5
        assert not {free[0], free[3]} & set(tokens[:5])
        prefilled = await prefill(pair.prefill, ask(prompt, 12, **knobs))
        first, ticket = list(prefilled.first_token_ids), prefilled.ticket
        assert ticket is not None
        assert first == tokens[:1]
        rest, other = await collect(resume(pair.decode, ask(prompt, 12, **knobs), ticket))
        if pair.decode.info.continues_first_token:
            rest = first + rest
        assert rest == tokens
        assert (other.reason, other.stop_token_id) == (finish.reason, finish.stop_token_id)

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

    async def test_a_sink_gets_the_prompts_logprobs(
        self, rig: EngineRig, single: Started, stepper: StepEngine
    ) -> None:
        items: asyncio.Queue[Step | Exception] = asyncio.Queue()
        stepper.submit(ask(rig.prompt(9), 3, prompt_logprobs=2), None, items.put_nowait)
        rows = await scored(drain(items))
        again = await scored(single.engine.generate(ask(rig.prompt(9), 3, prompt_logprobs=2)))
        assert_alike(rows, again)

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


def assert_ranked(rows: Sequence[TokenLogprob], tokens: Sequence[int]) -> None:
    """Check each token's place: that among the likeliest, or behind all of them."""
    for row, token in zip(rows, tokens, strict=True):
        likeliest = [other for other, _ in row.top]
        if token in likeliest:
            assert row.rank == likeliest.index(token) + 1
        else:
            assert row.rank > len(likeliest)


def finite(rows: Sequence[TokenLogprob]) -> bool:
    values = [value for row in rows for value in (row.logprob, *(value for _, value in row.top))]
    return all(LOGPROB_FLOOR <= value <= 0 for value in values)


class TestPromptLogprobs:
    async def test_they_are_those_of_generating_the_same(
        self, rig: EngineRig, single: Started
    ) -> None:
        prompt = rig.prompt(9, 50)
        steps = single.engine.generate(ask(prompt, 12, ignore_eos=True, logprobs=3))
        tokens, generated = await measured(steps)
        whole = [*prompt, *tokens]
        rows = await scored(single.engine.generate(ask(whole, 2, prompt_logprobs=3)))
        assert len(rows) == len(whole) - 1
        assert_alike(rows[-len(tokens) :], generated)
        assert finite(rows)
        assert {len(row.top) for row in rows} == {3}
        for row in rows:
            values = [value for _, value in row.top]
            assert values == sorted(values, reverse=True)
        assert_ranked(rows, whole[1:])
        assert_ranked(generated, tokens)

    @pytest.mark.parametrize("length", [1, 2, 3])
    async def test_shortest_prompts(self, rig: EngineRig, single: Started, length: int) -> None:
        request = ask(rig.prompt(length), 2, ignore_eos=True, prompt_logprobs=1)
        assert len(await scored(single.engine.generate(request))) == length - 1

    async def test_of_the_prompts_tokens_alone(self, rig: EngineRig, single: Started) -> None:
        none = await scored(single.engine.generate(ask(rig.prompt(9), 2, prompt_logprobs=0)))
        some = await scored(single.engine.generate(ask(rig.prompt(9), 2, prompt_logprobs=2)))
        assert [row.top for row in none] == [()] * 8
        assert [row.logprob for row in none] == pytest.approx(
            [row.logprob for row in some], abs=1e-3
        )

    async def test_a_cached_prefix_loses_none(self, rig: EngineRig, single: Started) -> None:
        prompt = rig.prompt(3 * single.info.block_size + 1, 51)
        request = ask(prompt, 2, prompt_logprobs=2)
        fresh = await scored(single.engine.generate(request))
        plain, finish = await generate(single, ask(prompt, 2))
        assert finish.cached_tokens == 3 * single.info.block_size  # it left its blocks
        again = replace(request, request_id=f"r-{next(_ids)}")
        tokens, finish = await generate(single, again)
        assert (tokens, finish.cached_tokens) == (plain, 0)
        again = replace(request, request_id=f"r-{next(_ids)}")
        assert_alike(await scored(single.engine.generate(again)), fresh)

    async def test_others_in_the_batch_change_nothing(
        self, rig: EngineRig, single: Started
    ) -> None:
        def requests() -> list[EngineRequest]:
            prompts = [rig.prompt(length, 60 + length) for length in (300, 5, 170, 33)]
            return [ask(prompt, 6, ignore_eos=True, prompt_logprobs=1) for prompt in prompts]

        async def plain(variant: int) -> None:
            request = ask(rig.prompt(150, 70 + variant), 9, ignore_eos=True)
            async for step in single.engine.generate(request):
                assert step.prompt_logprobs is None

        alone = [await scored(single.engine.generate(request)) for request in requests()]
        together, _ = await asyncio.gather(
            asyncio.gather(*(scored(single.engine.generate(each)) for each in requests())),
            asyncio.gather(*(plain(variant) for variant in range(3))),
        )
        for rows, others in zip(together, alone, strict=True):
            assert_alike(rows, others)

    async def test_what_is_sampled_changes_none(self, rig: EngineRig, single: Started) -> None:
        knobs = {"temperature": 1.0, "seed": 1, "logit_bias": ((9, 100.0),), "logprobs": 1}
        plain = await scored(single.engine.generate(ask(rig.prompt(9), 3, prompt_logprobs=2)))
        request = ask(rig.prompt(9), 3, prompt_logprobs=2, **knobs)
        assert_alike(await scored(single.engine.generate(request)), plain)

    async def test_half_a_request_gives_none(self, rig: EngineRig, pair: Pair) -> None:
        prompt = rig.prompt(19, 52)
        with pytest.raises(InvalidRequestError) as caught:
            await prefill(pair.prefill, ask(prompt, prompt_logprobs=1))
        assert caught.value.field == "prompt_logprobs"
        ticket = await prefill_ticket(pair.prefill, ask(prompt))
        with pytest.raises(InvalidRequestError) as caught:
            await collect(resume(pair.decode, ask(prompt, prompt_logprobs=1), ticket))
        assert caught.value.field == "prompt_logprobs"
        assert await release(pair.prefill, ticket)


async def scored(steps: AsyncIterator[Step]) -> list[TokenLogprob]:
    """Return how likely the prompt's tokens were: told once, not after the first token."""
    found: list[Sequence[TokenLogprob]] = []
    tokens = 0
    async for step in steps:
        if step.prompt_logprobs is not None:
            assert not tokens
            found.append(step.prompt_logprobs)
        tokens += len(step.token_ids)
    (rows,) = found
    return list(rows)


class TestAllowedTokens:
    async def test_the_likeliest_of_them_is_picked(self, rig: EngineRig, single: Started) -> None:
        _, rows = await measured(single.engine.generate(ask(rig.prompt(9), 1, logprobs=4)))
        first, second, third, _ = (token for token, _ in rows[0].top)
        request = ask(rig.prompt(9), 6, ignore_eos=True, allowed_token_ids=(third, second))
        tokens, _ = await generate(single, request)
        assert tokens[0] == second
        assert set(tokens) <= {second, third}
        assert first not in tokens

    async def test_nothing_else_is_sampled(self, rig: EngineRig, single: Started) -> None:
        few = (11, 300 % single.info.vocab_size, 222)
        knobs = {"temperature": 2.0, "ignore_eos": True, "logit_bias": ((12, 100.0),)}
        request = ask(rig.prompt(9), 24, allowed_token_ids=few, seed=3, **knobs)
        tokens, _ = await generate(single, request)
        assert set(tokens) <= set(few)

    async def test_others_in_the_batch_are_free(self, rig: EngineRig, single: Started) -> None:
        plain, _ = await generate(single, ask(rig.prompt(9), 6, ignore_eos=True))
        held = ask(rig.prompt(9), 6, ignore_eos=True, allowed_token_ids=(11,))
        free = ask(rig.prompt(9), 6, ignore_eos=True)
        (one, _), (two, _) = await asyncio.gather(generate(single, held), generate(single, free))
        assert one == [11] * 6
        assert two == plain

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    async def test_a_remote_prefill_keeps_to_them(
        self, rig: EngineRig, pair: Pair, temperature: float
    ) -> None:
        few = (11, 222, 17, 57)
        knobs = {"temperature": temperature, "seed": 5, "ignore_eos": True}

        def request() -> EngineRequest:
            return ask(rig.prompt(19, 80), 8, allowed_token_ids=few, **knobs)

        local, _ = await generate(pair.decode, request())
        assert set(local) <= set(few)
        prefilled, remote = await hand_off(pair, request(), request())
        assert set(prefilled.first_token_ids) <= set(few)
        assert remote == local


async def hand_off(
    pair: Pair, request: EngineRequest, again: EngineRequest
) -> tuple[Prefilled, list[int]]:
    """Prefill and decode in two engines; return what prefill gave, and the whole answer."""
    prefilled = await prefill(pair.prefill, request)
    assert prefilled.ticket is not None
    tokens, _ = await collect(resume(pair.decode, again, prefilled.ticket))
    if pair.decode.info.continues_first_token:
        tokens = [*prefilled.first_token_ids, *tokens]
    return prefilled, tokens


class TestSampling:
    @pytest.mark.parametrize("seed", [-(2**63), -2, -1, 0, 2**31, 2**32, 2**63 - 1])
    async def test_a49_seeds_of_64_bits_repeat(self, rig: EngineRig, pair: Pair, seed: int) -> None:
        def request() -> EngineRequest:
            return ask(rig.prompt(19, 90), 6, temperature=1.0, seed=seed, ignore_eos=True)

        tokens, _ = await generate(pair.decode, request())
        assert (await generate(pair.decode, request()))[0] == tokens
        assert (await hand_off(pair, request(), request()))[1] == tokens

    async def test_a49_seeds_are_random_streams(self, rig: EngineRig, single: Started) -> None:
        async def tokens(**knobs: object) -> tuple[int, ...]:
            return tuple(
                (await generate(single, ask(rig.prompt(19), 8, ignore_eos=True, **knobs)))[0]
            )

        seeds = [-2, -1, 0, 1, 2**31]
        streams = {await tokens(temperature=1.0, seed=seed) for seed in seeds}
        assert len(streams) == len(seeds)
        assert await tokens(temperature=0.0) not in streams

    @pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1])
    async def test_a49_seeds_beyond_64_bits_are_refused(self, rig: EngineRig, seed: int) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            ask(rig.prompt(3), seed=seed)
        assert caught.value.field == "seed"

    async def test_a11_zeros_are_zeros(self, rig: EngineRig, single: Started) -> None:
        zeros = {
            "min_tokens": 0,
            "temperature": 0.0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": 0,
            "logprobs": 0,
            "prompt_logprobs": 0,
        }
        plain, _ = await measured(single.engine.generate(ask(rig.prompt(9), 6, logprobs=1)))
        steps = [step async for step in single.engine.generate(ask(rig.prompt(9), 6, **zeros))]
        assert [token for step in steps for token in step.token_ids] == plain
        for step in steps:
            assert [row.top for row in step.logprobs or ()] == [()] * len(step.token_ids)
        assert [row.top for row in steps[0].prompt_logprobs or ()] == [()] * 8

    @pytest.mark.parametrize(
        "knobs",
        [
            {"top_k": 1, "temperature": 1.0},
            {"top_p": 1e-9, "temperature": 1.0},
            {"min_p": 1.0, "temperature": 1.0},
            {"temperature": 2.0, "seed": 4},
            {"temperature": 0.0, "logit_bias": tuple((token, -100.0) for token in range(200))},
            {"temperature": 0.0, "logit_bias": ((3, 100.0), (4, -100.0))},
            {"allowed_token_ids": (3, 4), "temperature": 1.0},
            {"allowed_token_ids": (3,), "logit_bias": ((3, -100.0),)},
            {"min_tokens": 3, "repetition_penalty": 100.0},
            {"bad_words": tuple((token,) for token in range(100)), "temperature": 1.0},
        ],
        ids="-".join,
    )
    async def test_a36_logprobs_are_finite_whatever_is_masked(
        self, rig: EngineRig, single: Started, knobs: dict[str, object]
    ) -> None:
        request = ask(rig.prompt(9), 3, logprobs=20, prompt_logprobs=20, **knobs)
        steps = [step async for step in single.engine.generate(request)]
        rows = [row for step in steps for row in step.logprobs or ()]
        prompt = [row for step in steps for row in step.prompt_logprobs or ()]
        assert len(rows) == sum(len(step.token_ids) for step in steps) > 0
        assert len(prompt) == 8
        assert finite(rows + prompt)
        assert {len(row.top) for row in rows + prompt} == {20}


SEEDED = {"temperature": 1.0, "seed": 7}
PENALIZED = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}


def going_on(request: EngineRequest, generated: Sequence[int]) -> EngineRequest:
    return replace(request, request_id=f"request-{next(_ids)}", generated=generated)


class TestContinuation:
    """A completion that began elsewhere: nobody can tell where it was cut."""

    @pytest.mark.parametrize(
        "knobs", [{}, SEEDED, PENALIZED, SEEDED | PENALIZED], ids=["greedy", "seeded", "pen", "all"]
    )
    async def test_is_what_would_have_come(
        self, rig: EngineRig, single: Started, knobs: dict[str, object]
    ) -> None:
        request = ask(rig.prompt(21, 5), 12, ignore_eos=True, logprobs=1, **knobs)
        whole, _ = await generate(single, request)
        for cut in (1, 2, 7, 11):
            rest = going_on(request, whole[:cut])
            if single.info.engine == "vllm" and knobs:
                with pytest.raises(InvalidRequestError, match="can't go on") as refused:
                    await generate(single, rest)
                assert refused.value.field == "generated_token_ids"
            else:
                tokens, finish = await generate(single, rest)
                assert tokens == whole[cut:]
                assert finish.reason is FinishReason.LENGTH

    async def test_over_block_edges(self, rig: EngineRig, single: Started) -> None:
        size = single.info.block_size
        for length in (size - 1, size, size + 1):
            request = ask(rig.prompt(length, 6), size + 3, ignore_eos=True)
            whole, _ = await generate(single, request)
            for cut in (1, size, size + 2):
                tokens, _ = await generate(single, going_on(request, whole[:cut]))
                assert tokens == whole[cut:]

    async def test_what_was_generated_counts(self, rig: EngineRig, single: Started) -> None:
        free, _ = await generate(single, ask(rig.prompt(9), 12, ignore_eos=True))
        at = next(at for at in range(3, 12) if free[at] not in free[:at])
        request = ask(rig.prompt(9), 12, min_tokens=2, stop_token_ids=(free[at],), ignore_eos=True)
        tokens, finish = await generate(single, going_on(request, free[:2]))
        assert tokens == free[2 : at + 1]
        assert finish.stop_token_id == free[at]

    async def test_of_logprobs_only_what_follows(self, rig: EngineRig, single: Started) -> None:
        request = ask(rig.prompt(9), 6, logprobs=2, ignore_eos=True)
        whole = [step async for step in single.engine.generate(request)]
        tokens = [token for step in whole for token in step.token_ids]
        rows = [row for step in whole for row in step.logprobs or ()]
        rest = [step async for step in single.engine.generate(going_on(request, tokens[:4]))]
        again = [row for step in rest for row in step.logprobs or ()]
        assert [row.logprob for row in again] == pytest.approx(
            [r.logprob for r in rows[4:]], abs=1e-4
        )

    async def test_nothing_is_left_to_generate(self, rig: EngineRig, single: Started) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await generate(single, going_on(ask(rig.prompt(9), 2), rig.prompt(2)))
        assert caught.value.field == "max_tokens"

    async def test_ids_outside_of_the_vocabulary(self, rig: EngineRig, single: Started) -> None:
        with pytest.raises(InvalidRequestError):
            await generate(single, going_on(ask(rig.prompt(9)), [single.info.vocab_size]))


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
