"""Log probabilities in the messages of the prefill and decode services, as they are sent."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from kvmesh.clock import SystemClock
from kvmesh.engine.base import EngineInfo, EngineRequest, Finish, Prefilled, Step, StepSink
from kvmesh.host.desk import EngineDesk, Running
from kvmesh.host.process import Process
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.server import serve
from kvmesh.telemetry import quiet_telemetry
from kvmesh.testing.discovery import MemoryDiscovery
from kvmesh.types import FinishReason, KvTicket, Load, Role, Sampling, TokenLogprob
from kvmesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from kvmesh.wire import sampling_to_proto
from kvmesh.wire_logprobs import logprobs_from_proto
from services.decode.servicer import MAX_UNSENT_TOP_TOKENS, PROMPT_TOKENS, DecodeServicer
from services.prefill.servicer import PrefillServicer

INFO = EngineInfo("script", "m", 10_000, 10_000, 4, 10)
END = Finish(FinishReason.LENGTH)
ASKED = Sampling(logprobs=2, logit_bias=((5, 1.5),), allowed_token_ids=(5, 6))
ZEROS = Sampling(
    temperature=0.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, seed=0,
    logprobs=0, prompt_logprobs=0,
)  # fmt: skip


def row(logprob: float, count: int = 2) -> TokenLogprob:
    return TokenLogprob(logprob, tuple((10 + n, -0.5 - n) for n in range(count)))


class Script:
    """An engine that answers every request with the same steps, all in one turn."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.asked: list[Sampling] = []

    async def start(self) -> EngineInfo:
        return INFO

    def generate(self, request: EngineRequest) -> AsyncIterator[Step]:
        raise AssertionError("an engine that works in steps is given a sink")

    def submit(self, request: EngineRequest, ticket: KvTicket | None, sink: StepSink) -> None:
        self.asked.append(request.sampling)
        for step in self.steps:
            sink(step)

    def cancel(self, request_id: str) -> bool:
        return False

    async def prefill(self, request: EngineRequest) -> Prefilled:
        (step,) = self.steps
        return Prefilled(step.token_ids, 0, finish=step.finish, logprobs=step.logprobs)

    async def release(self, ticket_id: str) -> bool:
        return False

    def load(self) -> Load:
        return Load()

    def check(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Iterating:
    """The same, one step at a time, as an engine without sinks does it."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    async def start(self) -> EngineInfo:
        return INFO

    async def generate(self, request: EngineRequest) -> AsyncIterator[Step]:
        for step in self.steps:
            yield step

    def load(self) -> Load:
        return Load()

    def check(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def channel(engine: Any, info: EngineInfo = INFO) -> AsyncIterator[grpc.aio.Channel]:
    process = Process(
        id="w",
        role=Role.DECODE,
        epoch="e",
        clock=SystemClock(),
        rng=random.Random(1),
        telemetry=quiet_telemetry(),
        discovery=MemoryDiscovery(),
        gate=Gate(),
        environ={},
    )
    desk = EngineDesk(Running(engine, info), process)
    services = {
        "kvmesh.v1.DecodeService": DecodeServicer(desk).register,
        "kvmesh.v1.PrefillService": PrefillServicer(desk, engine).register,
    }
    async with (
        serve(RpcConfig(), services) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as opened,
    ):
        yield opened


def start_of(request: Any, prompt: Sequence[int] = (1, 2, 3), sampling: Sampling = ASKED) -> Any:
    start = request.starts.add(stream_id=1, token_ids=prompt)
    start.context.request_id = "r"
    sampling_to_proto(sampling, start.sampling)
    return request


async def decoded(engine: Any, *asked: Any) -> tuple[list[Any], generation_pb2.StreamEnd]:
    """Return the deltas that one request was answered with, and its end."""
    deltas: list[Any] = []
    async with channel(engine) as opened:
        call = decode_pb2_grpc.DecodeServiceStub(opened).Decode(timeout=20)
        await call.write(decode_pb2.DecodeRequest(open={"schema_revision": 1}))
        await call.write(start_of(decode_pb2.DecodeRequest(), *asked))
        while True:
            response = await call.read()
            deltas.extend(response.deltas)
            if response.ends:
                call.cancel()
                return deltas, response.ends[0]


async def prefilled(engine: Script, info: EngineInfo = INFO) -> prefill_pb2.PrefillResult:
    async with channel(engine, info) as opened:
        call = prefill_pb2_grpc.PrefillServiceStub(opened).Prefill(timeout=20)
        await call.write(prefill_pb2.PrefillRequest(open={"schema_revision": 1}))
        await call.write(start_of(prefill_pb2.PrefillRequest()))
        while True:
            response = await call.read()
            if response.results:
                call.cancel()
                return response.results[0]


async def test_what_is_asked_of_the_engine_arrives() -> None:
    engine = Script([Step((7,), END)])
    await decoded(engine)
    assert engine.asked == [ASKED]


@pytest.mark.parametrize("asked", [ZEROS, Sampling()], ids=["zeros", "nothing"])
async def test_a11_zeros_arrive_as_zeros_and_what_is_absent_as_absent(asked: Sampling) -> None:
    engine = Script([Step((7,), END)])
    await decoded(engine, (1, 2, 3), asked)
    assert engine.asked == [asked]


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**31, 2**32, 2**63 - 1])
async def test_a49_seeds_arrive(seed: int) -> None:
    engine = Script([Step((7,), END)])
    await decoded(engine, (1, 2, 3), Sampling(seed=seed))
    assert [asked.seed for asked in engine.asked] == [seed]


@pytest.mark.parametrize("kind", [Script, Iterating])
@pytest.mark.parametrize("apart", [False, True], ids=["with-a-token", "before-it"])
@pytest.mark.parametrize("length", [1, 2, 1024, 1025, 1026, 3000])
async def test_a_prompts_logprobs_come_in_pieces_before_the_first_token(
    length: int, apart: bool, kind: Any
) -> None:
    prompt = [9 + at for at in range(length)]
    rows = [row(-float(at)) for at in range(1, length)]
    own = [row(-0.5), row(-0.25)]
    steps = [Step((7,), None, own[:1], rows), Step((8,), END, own[1:])]
    if apart:
        steps[:1] = [Step((), None, None, rows), Step((7,), None, own[:1])]
    asked = Sampling(logprobs=2, prompt_logprobs=2)
    deltas, end = await decoded(kind(steps), prompt, asked)
    pieces = [delta for delta in deltas if delta.prompt]
    assert deltas[: len(pieces)] == pieces
    assert [delta.offset for delta in pieces] == list(range(1, length, PROMPT_TOKENS))
    assert all(len(delta.token_ids) <= PROMPT_TOKENS for delta in pieces)
    assert [token for delta in pieces for token in delta.token_ids] == prompt[1:]
    assert [each for delta in pieces for each in logprobs_from_proto(delta) or ()] == rows
    rest = deltas[len(pieces) :]
    assert [token for delta in rest for token in delta.token_ids] == [7, 8]
    assert rest[0].offset == 0
    assert [each for delta in rest for each in logprobs_from_proto(delta) or ()] == own
    usage = end.completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (length, 2)


async def test_steps_that_share_a_delta_keep_their_columns_aligned() -> None:
    rows = [row(-1.0), row(-2.0), row(-3.0)]
    steps = [Step((7,), None, rows[:1]), Step((8, 9), END, rows[1:])]
    (delta,), _ = await decoded(Script(steps))
    assert list(delta.token_ids) == [7, 8, 9]
    assert list(delta.logprobs) == [-1.0, -2.0, -3.0]
    assert list(delta.top_token_ids) == [10, 11] * 3
    assert list(delta.top_logprobs) == [-0.5, -1.5] * 3
    assert delta.top_count == 2
    assert logprobs_from_proto(delta) == tuple(rows)


async def test_the_sampled_tokens_alone_have_one_column() -> None:
    (delta,), _ = await decoded(Script([Step((7, 8), END, [row(-1.0, 0), row(-2.0, 0)])]))
    assert list(delta.logprobs) == [-1.0, -2.0]
    assert (delta.top_count, list(delta.top_token_ids)) == (0, [])


async def test_no_columns_unless_the_engine_gives_them() -> None:
    (delta,), _ = await decoded(Script([Step((7,)), Step((8,), END)]))
    assert delta == generation_pb2.TokenDelta(stream_id=1, token_ids=[7, 8])


@pytest.mark.parametrize(
    "other", [None, [row(-2.0, 1)], [row(-2.0, 3)]], ids=["none", "fewer", "more"]
)
async def test_steps_with_other_columns_get_a_delta_of_their_own(
    other: list[TokenLogprob] | None,
) -> None:
    steps = [Step((7,), None, [row(-1.0)]), Step((8,), END, other)]
    for order in (steps, [replace(steps[1], finish=None), replace(steps[0], finish=END)]):
        deltas, end = await decoded(Script(order))
        assert [list(delta.token_ids) for delta in deltas] == [list(s.token_ids) for s in order]
        assert [delta.offset for delta in deltas] == [0, 1]
        for delta, step in zip(deltas, order, strict=True):
            assert logprobs_from_proto(delta) == tuple(step.logprobs or ())
        assert end.completion.usage.completion_tokens == 2


async def test_a_reader_that_leaves_too_many_likeliest_tokens_fails() -> None:
    many = Step((7,) * 64, None, [row(-1.0, 20)] * 64)
    enough = MAX_UNSENT_TOP_TOKENS // (64 * 20)
    _, end = await decoded(Script([*[many] * enough, Step((), END)]))
    assert end.WhichOneof("outcome") == "completion"
    _, end = await decoded(Script([many] * (enough + 1)))
    assert end.WhichOneof("outcome") == "error"


async def test_a_prefill_that_is_all_tells_its_logprobs() -> None:
    result = await prefilled(Script([Step((7,), END, [row(-1.0)])]))
    assert list(result.first_token_ids) == [7]
    assert logprobs_from_proto(result) == (row(-1.0),)


async def test_a_first_token_that_decode_drops_takes_its_logprobs_along() -> None:
    script = Script([Step((7,), None, [row(-1.0)])])
    dropped = await prefilled(script)
    assert dropped == prefill_pb2.PrefillResult(stream_id=1)
    kept = await prefilled(script, replace(INFO, continues_first_token=True))
    assert logprobs_from_proto(kept) == (row(-1.0),)
