"""Prefill and decode services over simulated engines and real gRPC."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import grpc.aio
import pytest

from kvmesh.clock import SystemClock
from kvmesh.engine.base import EngineInfo, PrefillEngine
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.engine.sim.faults import Faults
from kvmesh.engine.sim.latency import Latency
from kvmesh.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
    TicketError,
    TransferError,
)
from kvmesh.host.desk import EngineDesk, Running
from kvmesh.host.process import Process
from kvmesh.host.worker import WorkerServicer, tickets_settled
from kvmesh.kv.blocks import block_hashes
from kvmesh.rpc.clients import DecodeCall, PrefillAnswer, PrefillCall, decode, prefill
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.server import serve
from kvmesh.rpc.workers import release_kv, watch_worker
from kvmesh.telemetry import quiet_telemetry
from kvmesh.testing.discovery import MemoryDiscovery
from kvmesh.types import (
    BlocksStored,
    CacheSnapshot,
    Completion,
    Context,
    FinishReason,
    KvTicket,
    Role,
    Sampling,
    Worker,
)
from kvmesh.v1 import worker_pb2_grpc
from services.decode.servicer import DecodeServicer
from services.prefill.servicer import PrefillServicer

CLOCK = SystemClock()
FULL_SPEED = SimConfig(latency=Latency(speed=0))
PACED = SimConfig(latency=Latency(decode_us_per_step=5000))
PROMPT = list(range(300, 340))


@dataclass
class Rig:
    """One worker: its engine, its door and the way to it."""

    engine: SimEngine
    info: EngineInfo
    gate: Gate
    peer: Peer


@asynccontextmanager
async def worker(name: str, config: SimConfig = FULL_SPEED) -> AsyncIterator[Rig]:
    epoch = f"{name}-epoch"
    engine = SimEngine(
        config, model="m", worker_id=name, epoch=epoch, clock=CLOCK, rng=random.Random(1)
    )
    gate = Gate()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.aclose)
        info = await engine.start()
        process = Process(
            id=name,
            role=Role.DECODE,
            epoch=epoch,
            clock=CLOCK,
            rng=random.Random(1),
            telemetry=quiet_telemetry(),
            discovery=MemoryDiscovery(),
            gate=gate,
            environ={},
        )
        desk = EngineDesk(Running(engine, info), process)
        server = await stack.enter_async_context(serve(RpcConfig(), services(desk, process)))
        peer = Peer(Worker(name, epoch, f"127.0.0.1:{server.port}"), "test", RpcConfig())
        stack.push_async_callback(peer.aclose)
        yield Rig(engine, info, gate, peer)


def services(desk: EngineDesk, process: Process) -> dict[str, Callable[[grpc.aio.Server], None]]:
    assert isinstance(desk.engine, PrefillEngine)
    return {
        "kvmesh.v1.PrefillService": PrefillServicer(desk, desk.engine).register,
        "kvmesh.v1.DecodeService": DecodeServicer(desk).register,
        "kvmesh.v1.WorkerService": partial(
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            WorkerServicer(desk.engine, process.identity),
        ),
    }


def asked(peer: Peer, prompt: Sequence[int], sampling: Sampling) -> PrefillCall:
    def orphan(ticket: KvTicket) -> None:
        raise AssertionError(f"{ticket.ticket_id} was left behind")

    return prefill(peer, prompt, sampling, Context("r"), CLOCK, orphan=orphan)


async def prefilled(rig: Rig, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> PrefillAnswer:
    async with asked(rig.peer, prompt, sampling) as call:
        return await call.answer()


async def decoded(
    rig: Rig, sampling: Sampling, ticket: KvTicket | None, prompt: Sequence[int] = PROMPT
) -> tuple[list[int], Completion]:
    tokens: list[int] = []
    async with (
        asyncio.timeout(20),
        decode(
            rig.peer,
            prompt,
            sampling,
            Context("r"),
            CLOCK,
            ticket=ticket,
            sink=lambda ids, _: tokens.extend(ids),
        ) as call,
    ):
        return tokens, await call.completion


async def refused(
    rig: Rig, sampling: Sampling, ticket: KvTicket | None = None, prompt: Sequence[int] = PROMPT
) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await decoded(rig, sampling, ticket, prompt)
    return caught.value


async def freed(rig: Rig) -> None:
    """Wait until the worker holds nothing, for requests or for tickets."""
    async with asyncio.timeout(10):
        await rig.gate.idle()
        await tickets_settled(rig.engine)
        while True:
            load = rig.engine.load()
            if (load.running, load.waiting, load.used_blocks) == (0, 0, 0):
                return
            await asyncio.sleep(0.01)


async def test_remote_prefill_gives_what_local_prefill_gives() -> None:
    sampling = Sampling(max_tokens=20)
    async with worker("p") as p, worker("d") as d:
        local, end = await decoded(p, sampling, None)
        answer = await prefilled(p, sampling)
        assert answer.ticket is not None
        rest, remote_end = await decoded(d, sampling, answer.ticket)
        assert [*answer.first_token_ids, *rest] == local
        assert len(local) == 20
        for completion in (end, remote_end):
            assert completion.finish_reason is FinishReason.LENGTH
            assert completion.usage is not None
            assert completion.usage.prompt_tokens == len(PROMPT)
            assert completion.usage.completion_tokens == 20
        assert d.engine.load().received_bytes > 0
        await freed(p)
        await freed(d)


EARLY = replace(PACED, handoff="concurrent", max_batch_tokens=16)


async def test_decode_beside_prefill_gives_what_local_prefill_gives() -> None:
    sampling = Sampling(max_tokens=20)
    async with worker("p", EARLY) as p, worker("d") as d:
        local, _ = await decoded(d, sampling, None)
        async with asked(p.peer, PROMPT, sampling) as call:
            answer = await call.answer()
            assert answer.computing
            assert answer.ticket is not None
            assert not answer.first_token_ids
            assert not call.completion.done()
            tokens, end = await decoded(d, sampling, answer.ticket)
            computed = await call.completion
        assert tokens == local
        assert end.usage is not None
        assert end.usage.completion_tokens == 20
        assert computed.usage is not None
        assert computed.usage.prompt_tokens == len(PROMPT)
        assert d.engine.load().received_bytes > 0
        await freed(p)
        await freed(d)


async def test_cancel_while_the_prompt_is_computed_ends_its_ticket() -> None:
    async with worker("p", EARLY) as p, worker("d") as d:
        async with asked(p.peer, PROMPT, Sampling(max_tokens=20)) as call:
            ticket = (await call.answer()).ticket
            assert ticket is not None
        error = await refused(d, Sampling(max_tokens=20), ticket)
        assert isinstance(error, (TicketError, TransferError))
        await freed(p)
        await freed(d)


async def test_release_while_the_prompt_is_computed_fails_it() -> None:
    async with worker("p", EARLY) as p:
        async with asked(p.peer, PROMPT, Sampling(max_tokens=20)) as call:
            ticket = (await call.answer()).ticket
            assert ticket is not None
            assert await release_kv(p.peer, ticket)
            with pytest.raises(TicketError):
                await call.completion
        await freed(p)


async def test_a_prefill_that_samples_the_end_is_complete() -> None:
    async with worker("p") as p:
        async with asked(p.peer, PROMPT, Sampling(max_tokens=1)) as call:
            answer, end = await call.answer(), await call.completion
        assert answer.ticket is None
        assert len(answer.first_token_ids) == 1
        assert end.finish_reason is FinishReason.LENGTH
        first = answer.first_token_ids[0]
        stop = Sampling(max_tokens=9, stop_token_ids=(first,))
        async with asked(p.peer, PROMPT, stop) as call:
            assert (await call.answer()).ticket is None
            assert (await call.completion).stop == first
        await freed(p)


async def test_a_ticket_ends_once_and_is_refused_after() -> None:
    sampling = Sampling(max_tokens=5)
    async with worker("p") as p, worker("d") as d:
        ticket = (await prefilled(p, sampling)).ticket
        assert ticket is not None
        assert p.engine.load().ticket_bytes == ticket.byte_count > 0
        assert await release_kv(p.peer, ticket) is True
        assert await release_kv(p.peer, ticket) is False
        assert p.engine.load().ticket_bytes == 0
        assert type(await refused(d, sampling, ticket)) is TicketError
        other_life = replace(ticket, epoch="another")
        assert await release_kv(p.peer, other_life) is False
        await freed(p)
        await freed(d)


async def test_bad_input_ends_before_any_work() -> None:
    async with worker("d") as d:
        assert type(await refused(d, Sampling(), prompt=[])) is InvalidRequestError
        assert type(await refused(d, Sampling(), prompt=[2**32 - 1])) is InvalidRequestError
        long = [300] * 9000
        assert type(await refused(d, Sampling(max_tokens=5), prompt=long)) is ContextLengthError
        await freed(d)


async def test_a_thousand_requests_at_once_all_end_with_their_own_tokens() -> None:
    async with worker("d") as d:
        alone = [await decoded(d, Sampling(max_tokens=7), None, [300 + n, 301]) for n in range(20)]
        many = await asyncio.gather(
            *(decoded(d, Sampling(max_tokens=7), None, [300 + n % 20, 301]) for n in range(1000))
        )
        assert [tokens for tokens, _ in many] == [alone[n % 20][0] for n in range(1000)]
        await freed(d)


async def test_cancel_and_a_lost_client_free_the_engine() -> None:
    async with worker("d", PACED) as d:
        first = asyncio.Event()

        def sink(_: Sequence[int], __: object) -> None:
            first.set()

        def start() -> DecodeCall:
            return decode(
                d.peer,
                PROMPT,
                Sampling(max_tokens=4000),
                Context("r"),
                CLOCK,
                ticket=None,
                sink=sink,
            )

        async with start():
            async with asyncio.timeout(10):
                await first.wait()
            assert d.engine.load().running == 1
        await freed(d)
        start()
        start()
        await d.peer.aclose()
        await freed(d)


async def test_a28_an_engine_that_dies_fails_its_requests_and_says_so() -> None:
    config = replace(PACED, faults=Faults(crash_after_steps=3))
    async with worker("d", config) as d:
        error = await refused(d, Sampling(max_tokens=50))
        assert type(error) is EngineError
        with pytest.raises(EngineError):
            d.engine.check()


async def test_an_engine_that_refuses_is_overload_for_that_request() -> None:
    config = replace(FULL_SPEED, faults=Faults(refuse="generate"))
    async with worker("d", config) as d:
        assert type(await refused(d, Sampling(max_tokens=5))) is OverloadedError
        await freed(d)


async def test_a_watcher_gets_a_snapshot_then_numbered_changes() -> None:
    async with worker("d") as d:
        await decoded(d, Sampling(max_tokens=1), None)
        known = block_hashes(PROMPT, d.info.block_size, "m")
        news = watch_worker(d.peer, "test")
        first = await anext(news)
        assert (first.worker_id, first.epoch, first.sequence) == ("d", "d-epoch", 1)
        assert isinstance(first.events[0], CacheSnapshot)
        assert list(first.events[0].block_hashes) == known
        other = [n + 1000 for n in PROMPT]
        await decoded(d, Sampling(max_tokens=1), None, other)
        stored: list[int] = []
        sequence = 1
        async with asyncio.timeout(10):
            while len(stored) < len(known):
                message = await anext(news)
                sequence += 1
                assert message.sequence == sequence
                for event in message.events:
                    if isinstance(event, BlocksStored):
                        stored.extend(event.block_hashes)
        assert stored == block_hashes(other, d.info.block_size, "m")
        await news.aclose()
