"""One suite for engines whose decode can begin beside prefill: `ConcurrentPrefillEngine`."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import pytest_asyncio

from kvmesh.engine.base import (
    AsyncEngine,
    ConcurrentPrefillEngine,
    EngineRequest,
    Finish,
    Prefilled,
    PrefillEngine,
    ResumeEngine,
    Step,
    StepEngine,
)
from kvmesh.errors import EngineError, InvalidRequestError, TicketError, TransferError
from kvmesh.testing.cluster import until
from kvmesh.testing.engine import EngineRig
from kvmesh.testing.rigs import CONCURRENT, RIGS
from kvmesh.types import FinishReason, KvTicket, Sampling, TokenLogprob

pytestmark = pytest.mark.asyncio(loop_scope="module")

_ids = itertools.count()


class Both(ConcurrentPrefillEngine, PrefillEngine, ResumeEngine, AsyncEngine):
    """What the engines of this suite are."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(CONCURRENT))
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[EngineRig]:
    async with RIGS[request.param]() as opened:
        yield opened


@dataclass(frozen=True, slots=True)
class Ends:
    """The engine that prefills, and the one that decodes."""

    prefill: Both
    decode: Both
    context_length: int


@pytest_asyncio.fixture(loop_scope="module")
async def ends(rig: EngineRig) -> AsyncIterator[Ends]:
    async with rig.pair() as lent:
        one, two = lent.prefill.engine, lent.decode.engine
        for each in (one, two):
            assert isinstance(each, ConcurrentPrefillEngine)
            assert isinstance(each, ResumeEngine)
        yield Ends(cast("Both", one), cast("Both", two), lent.decode.info.context_length)
        await idle(one)
        await idle(two)


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine holds nothing for anybody."""

    def free() -> bool:
        load = engine.load()
        return not load.running + load.waiting + load.used_blocks + load.ticket_blocks

    await until(free)


def ask(prompt: Sequence[int], max_tokens: int = 8, **sampling: object) -> EngineRequest:
    knobs = Sampling(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(f"concurrent-{next(_ids)}", prompt, replace(knobs, **sampling))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request."""

    tokens: list[int]
    finish: Finish
    logprobs: list[TokenLogprob]


async def read(steps: AsyncIterator[Step]) -> Answer:
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    async for step in steps:
        tokens.extend(step.token_ids)
        logprobs.extend(step.logprobs or ())
        finish = step.finish
    assert finish is not None
    return Answer(tokens, finish, logprobs)


class Announced:
    """A prefill that runs, and its ticket once that is there."""

    def __init__(self, engine: ConcurrentPrefillEngine, request: EngineRequest) -> None:
        self.arrived: asyncio.Future[KvTicket] = asyncio.get_running_loop().create_future()
        self.cached_tokens = -1
        self.task: asyncio.Task[Prefilled] = asyncio.create_task(
            engine.prefill_announced(request, self._announce)
        )

    def _announce(self, ticket: KvTicket, cached_tokens: int) -> None:
        assert not self.task.done()
        self.cached_tokens = cached_tokens
        self.arrived.set_result(ticket)  # raises if it comes twice

    async def ticket(self) -> KvTicket:
        either: list[asyncio.Future[Any]] = [self.arrived, self.task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self.arrived.result()


async def handed_over(ends: Ends, request: EngineRequest) -> Answer:
    """Run a request with its decode dispatched as soon as the ticket is there."""
    announced = Announced(ends.prefill, request)
    answer = await read(ends.decode.resume(request, await announced.ticket()))
    prefilled = await announced.task
    assert prefilled.ticket == announced.arrived.result()
    assert prefilled.first_token_ids == ()
    assert prefilled.finish is None
    assert prefilled.cached_tokens == announced.cached_tokens
    return answer


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 63, 64, 65, 200])
async def test_equals_generate(rig: EngineRig, ends: Ends, length: int) -> None:
    prompt = rig.prompt(length)
    whole = await read(ends.decode.generate(ask(prompt)))
    for _ in range(2):  # the second time with all that can be cached on both ends
        assert (await handed_over(ends, ask(prompt))).tokens == whole.tokens


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "seed": 8, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"logprobs": 2},
        {"temperature": 0.0, "min_tokens": 4},
    ],
)
async def test_all_of_sampling_is_decodes(
    rig: EngineRig, ends: Ends, knobs: dict[str, object]
) -> None:
    prompt = rig.prompt(30, 1)
    whole = await read(ends.decode.generate(ask(prompt, 12, **knobs)))
    answer = await handed_over(ends, ask(prompt, 12, **knobs))
    assert answer.tokens == whole.tokens
    told, due = ([pair for row in rows.logprobs for pair in row.top] for rows in (answer, whole))
    assert [token for token, _ in told] == [token for token, _ in due]
    assert [value for _, value in told] == pytest.approx([value for _, value in due], abs=1e-4)


async def test_the_first_token_may_be_the_last(rig: EngineRig, ends: Ends) -> None:
    prompt = rig.prompt(20, 2)
    (first,) = (await read(ends.decode.generate(ask(prompt, 1)))).tokens
    one = await handed_over(ends, ask(prompt, 1))
    assert (one.tokens, one.finish.reason) == ([first], FinishReason.LENGTH)
    stopped = await handed_over(ends, ask(prompt, stop_token_ids=(first,)))
    assert (stopped.tokens, stopped.finish.reason) == ([first], FinishReason.STOP)
    assert stopped.finish.stop_token_id == first


async def test_many_at_once(rig: EngineRig, ends: Ends) -> None:
    prompts = [rig.prompt(10 + 3 * n, n % 5) for n in range(24)]
    alone = [(await read(ends.decode.generate(ask(each, 6)))).tokens for each in prompts]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(handed_over(ends, ask(each, 6))) for each in prompts]
    assert [task.result().tokens for task in tasks] == alone


async def test_one_prompt_many_times_at_once(rig: EngineRig, ends: Ends) -> None:
    """Those that compute the same blocks at once keep the ones that their tickets name."""
    prompt = rig.prompt(50, 6)
    whole = await read(ends.decode.generate(ask(prompt, 6)))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(handed_over(ends, ask(prompt, 6))) for _ in range(8)]
    assert [task.result().tokens for task in tasks] == [whole.tokens] * 8


async def test_what_was_cached_is_known_with_the_ticket(rig: EngineRig, ends: Ends) -> None:
    prompt = rig.prompt(40, 7)
    await handed_over(ends, ask(prompt))
    again = Announced(ends.prefill, ask(prompt))
    ticket = await again.ticket()
    assert again.cached_tokens == 36
    await again.task
    assert await ends.prefill.release(ticket.ticket_id)


async def test_the_lease_is_one_like_any_other(rig: EngineRig, ends: Ends) -> None:
    announced = Announced(ends.prefill, ask(rig.prompt(20, 8)))
    ticket = await announced.ticket()
    await announced.task
    assert ends.prefill.load().ticket_blocks == 5
    assert await ends.prefill.release(ticket.ticket_id)
    assert not await ends.prefill.release(ticket.ticket_id)
    with pytest.raises(TicketError):
        await read(ends.decode.resume(ask(rig.prompt(20, 8)), ticket))


async def test_a_ticket_is_good_once(rig: EngineRig, ends: Ends) -> None:
    request = ask(rig.prompt(20, 9))
    announced = Announced(ends.prefill, request)
    ticket = await announced.ticket()
    await read(ends.decode.resume(request, ticket))
    await announced.task
    with pytest.raises(TicketError):
        await read(ends.decode.resume(ask(rig.prompt(20, 9)), ticket))


async def test_cancelled_it_holds_nothing(rig: EngineRig, ends: Ends) -> None:
    request = ask(rig.prompt(200, 10))
    announced = Announced(ends.prefill, request)
    ticket = await announced.ticket()
    announced.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await announced.task
    with pytest.raises((TicketError, TransferError)):
        await read(ends.decode.resume(request, ticket))


async def test_given_back_it_fails(rig: EngineRig, ends: Ends) -> None:
    announced = Announced(ends.prefill, ask(rig.prompt(200, 11)))
    ticket = await announced.ticket()
    assert await ends.prefill.release(ticket.ticket_id)
    await asyncio.wait([announced.task])
    failure = announced.task.exception()  # none where it was computed by then
    assert failure is None or isinstance(failure, TicketError)
    with pytest.raises((TicketError, TransferError)):
        await read(ends.decode.resume(ask(rig.prompt(200, 11)), ticket))


async def test_closing_a_resume_frees_all(rig: EngineRig, ends: Ends) -> None:
    request = ask(rig.prompt(200, 12))
    announced = Announced(ends.prefill, request)
    ticket = await announced.ticket()
    reading = asyncio.create_task(read(ends.decode.resume(request, ticket)))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await announced.task
    await ends.prefill.release(ticket.ticket_id)


async def test_a_cancelled_sink_is_silent(rig: EngineRig, ends: Ends) -> None:
    assert isinstance(ends.decode, StepEngine)
    request = ask(rig.prompt(200, 13))
    announced = Announced(ends.prefill, request)
    heard: list[object] = []
    ends.decode.submit(request, await announced.ticket(), heard.append)
    await asyncio.sleep(0)
    assert ends.decode.cancel(request.request_id)
    await announced.task
    await idle(ends.decode)
    assert heard == []
    await ends.prefill.release(announced.arrived.result().ticket_id)


async def test_bad_requests_are_refused_before_a_ticket(rig: EngineRig, ends: Ends) -> None:
    for bad in (ask([]), ask(rig.prompt(4), stop_token_ids=(1 << 30,)), ask([1 << 30])):
        announced = Announced(ends.prefill, bad)
        with pytest.raises(InvalidRequestError):
            await announced.task
        assert not announced.arrived.done()


async def test_the_longest_prompt(rig: EngineRig, ends: Ends) -> None:
    prompt = rig.prompt(ends.context_length - 1, 14)
    whole = await read(ends.decode.generate(ask(prompt, 1)))
    assert (await handed_over(ends, ask(prompt, 1))).tokens == whole.tokens


async def test_an_engine_that_closes_fails_it(rig: EngineRig) -> None:
    async with rig.pair() as lent:
        one, two = lent.prefill.engine, lent.decode.engine
        assert isinstance(one, ConcurrentPrefillEngine)
        assert isinstance(two, ResumeEngine)
        request = ask(rig.prompt(200, 15))
        announced = Announced(one, request)
        ticket = await announced.ticket()
        await one.aclose()
        await asyncio.wait([announced.task])
        failure = announced.task.exception()
        assert failure is None or isinstance(failure, EngineError)
        with pytest.raises((TicketError, TransferError)):
            await read(two.resume(request, ticket))
        await idle(two)
