"""Both halves of a multiplexed stream over a real gRPC connection."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc.aio
import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    MeshError,
    UnavailableError,
)
from kvmesh.rpc.clients import DecodeCall, decode
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.peer import Peer, PeerPool
from kvmesh.rpc.server import MeshServer, serve
from kvmesh.rpc.serving import Identity, ServerCall, ServerStream
from kvmesh.rpc.specs import DECODE
from kvmesh.types import Completion, Context, FinishReason, Sampling, Usage, Worker
from kvmesh.v1 import decode_pb2, decode_pb2_grpc

CLOCK = SystemClock()
SERVICE = "kvmesh.v1.DecodeService"


class LoudGate(Gate):
    """Tells when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = asyncio.Event()

    def close(self) -> None:
        super().close()
        self.closing.set()


class Echo(decode_pb2_grpc.DecodeServiceServicer):
    """Answers with the prompt's own tokens, one a step; `behave` replaces that."""

    def __init__(self, epoch: str = "e1") -> None:
        self.gate = LoudGate()
        self.epoch = epoch
        self.freed = 0
        self.behave: Callable[[Any, ServerCall], Any] = self.echo
        self.streams = 0

    async def Decode(self, request_iterator: Any, context: Any) -> None:
        self.streams += 1
        stream = ServerStream(
            DECODE,
            self.start,
            identity=Identity("decode-x", self.epoch),
            gate=self.gate,
            clock=CLOCK,
        )
        await stream.run(request_iterator, context)

    def start(self, start: Any, call: ServerCall) -> None:
        call.spawn(self.behave(start, call))

    async def echo(self, start: Any, call: ServerCall) -> Completion:
        for offset, token in enumerate(start.token_ids):
            await asyncio.sleep(0)
            call.outbox.next().deltas.add(
                stream_id=call.stream_id, offset=offset, token_ids=[token]
            )
        return Completion(FinishReason.STOP, Usage(1, len(start.token_ids)))

    async def hang(self, start: Any, call: ServerCall) -> Completion:
        try:
            call.outbox.next().deltas.add(stream_id=call.stream_id, token_ids=[1])
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.freed += 1
        raise AssertionError


@asynccontextmanager
async def served(echo: Echo, port: int = 0) -> AsyncIterator[MeshServer]:
    register = partial(decode_pb2_grpc.add_DecodeServiceServicer_to_server, echo)
    async with serve(RpcConfig(port=port), {SERVICE: register}) as server:
        await server.set_serving(True)
        yield server


@asynccontextmanager
async def connected(echo: Echo, epoch: str = "e1") -> AsyncIterator[Peer]:
    async with served(echo) as server:
        peer = Peer(Worker("decode-x", epoch, f"127.0.0.1:{server.port}"), "test", RpcConfig())
        try:
            yield peer
        finally:
            await peer.aclose()


class Ask:
    """One decode call and the tokens it brings."""

    def __init__(self, peer: Peer, tokens: list[int], timeout: float | None = None) -> None:
        self.tokens: list[int] = []
        self.first = asyncio.Event()
        deadline = None if timeout is None else CLOCK.now() + timeout
        self.call: DecodeCall = decode(
            peer,
            tokens,
            Sampling(),
            Context("r", deadline),
            CLOCK,
            ticket=None,
            sink=self.take,
        )

    def take(self, token_ids: Any, _: Any) -> None:
        self.tokens.extend(token_ids)
        self.first.set()

    async def done(self) -> Completion:
        async with asyncio.timeout(10):
            return await self.call.completion


async def ended(ask: Ask) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await ask.done()
    return caught.value


async def test_many_requests_share_one_stream_and_keep_their_own_tokens() -> None:
    async with connected(echo := Echo()) as peer:
        asks = [Ask(peer, [n] * (n + 1)) for n in range(200)]
        ends = [await ask.done() for ask in asks]
        assert [ask.tokens for ask in asks] == [[n] * (n + 1) for n in range(200)]
        assert [end.usage.completion_tokens for end in ends if end.usage] == list(range(1, 201))
        assert (echo.streams, echo.gate.running) == (1, 0)


async def test_a_failed_request_leaves_the_others_and_the_stream_alone() -> None:
    echo = Echo()

    async def behave(start: Any, call: ServerCall) -> Completion:
        match start.token_ids[0]:
            case 1:
                raise InvalidRequestError("no", field="token_ids")
            case 2:
                raise ValueError("a secret prompt")
        return await echo.echo(start, call)

    echo.behave = behave
    async with connected(echo) as peer:
        good, refused, broken = Ask(peer, [3]), Ask(peer, [1]), Ask(peer, [2])
        error = await ended(refused)
        assert (type(error), error.field) == (InvalidRequestError, "token_ids")
        error = await ended(broken)
        assert type(error) is InternalError
        assert "secret" not in error.message
        await good.done()
        await Ask(peer, [5]).done()
        assert echo.streams == 1


async def test_a_cancel_is_answered_once_and_after_all_is_freed() -> None:
    echo = Echo()
    echo.behave = echo.hang
    async with connected(echo) as peer:
        ask, other = Ask(peer, [1]), Ask(peer, [1])
        await ask.first.wait()
        ask.call.stream.cancel(ask.call.stream_id)
        ask.call.stream.cancel(ask.call.stream_id)
        assert type(await ended(ask)) is CancelledByCallerError
        assert echo.freed == 1
        assert echo.gate.running == 1
        other.call.leave()
        async with asyncio.timeout(10):
            await echo.gate.idle()
        assert echo.freed == 2


async def test_a_deadline_ends_the_work_on_the_server() -> None:
    echo = Echo()
    echo.behave = echo.hang
    async with connected(echo) as peer:
        assert type(await ended(Ask(peer, [1], timeout=0.05))) is DeadlineError
        assert (echo.freed, echo.gate.running) == (1, 0)
        assert type(await ended(Ask(peer, [1], timeout=0.0))) is DeadlineError


async def test_a_lost_client_frees_everything() -> None:
    echo = Echo()
    echo.behave = echo.hang
    async with connected(echo) as peer:
        asks = [Ask(peer, [1]) for _ in range(5)]
        for ask in asks:
            await ask.first.wait()
        await peer.aclose()
        for ask in asks:
            assert type(await ended(ask)) is UnavailableError
        async with asyncio.timeout(10):
            await echo.gate.idle()
        assert echo.freed == 5


async def test_a53_a_lost_server_fails_what_runs_and_a_new_one_is_reached_again() -> None:
    echo = Echo()
    echo.behave = echo.hang
    async with served(echo) as server:
        port = server.port
        peer = Peer(Worker("decode-x", "", f"127.0.0.1:{port}"), "test", RpcConfig())
        ask = Ask(peer, [1])
        await ask.first.wait()
    error = await ended(ask)
    assert type(error) is UnavailableError
    assert "decode-x" in error.message
    async with served(Echo(), port):
        async with asyncio.timeout(20):
            while True:
                again = Ask(peer, [1, 2])
                try:
                    await again.done()
                    break
                except UnavailableError:
                    await asyncio.sleep(0.05)
        assert again.tokens == [1, 2]
    await peer.aclose()


async def test_another_life_on_the_same_address_is_refused() -> None:
    async with connected(Echo(epoch="new"), epoch="old") as peer:
        error = await ended(Ask(peer, [1, 2, 3]))
        assert type(error) is UnavailableError
        assert "restarted" in error.message


async def test_a_drain_refuses_new_requests_and_lets_running_ones_end() -> None:
    echo, finish = Echo(), asyncio.Event()

    async def behave(start: Any, call: ServerCall) -> Completion:
        call.outbox.next().deltas.add(stream_id=call.stream_id, token_ids=[1])
        await finish.wait()
        return Completion(FinishReason.STOP)

    async def settled() -> None:
        pass

    echo.behave = behave
    async with served(echo) as server:
        peer = Peer(Worker("decode-x", "e1", f"127.0.0.1:{server.port}"), "test", RpcConfig())
        running = Ask(peer, [1])
        await running.first.wait()
        drain = asyncio.create_task(server.drain(echo.gate, settled, 10))
        await echo.gate.closing.wait()
        assert type(await ended(Ask(peer, [1]))) is DrainingError
        finish.set()
        await running.done()
        assert await drain is True
        await peer.aclose()


async def test_a_request_in_a_task_that_cancels_itself_still_ends() -> None:
    echo = Echo()

    async def behave(start: Any, call: ServerCall) -> Completion:
        raise asyncio.CancelledError

    echo.behave = behave
    async with connected(echo) as peer:
        assert type(await ended(Ask(peer, [1]))) is CancelledByCallerError


async def raw(peer: Peer, *messages: Any) -> grpc.StatusCode:
    rpc = decode_pb2_grpc.DecodeServiceStub(peer.channel).Decode(iter(messages), timeout=10)
    try:
        async for _ in rpc:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def opened(revision: int = 1) -> Any:
    message = decode_pb2.DecodeRequest()
    message.open.schema_revision = revision
    return message


def started(stream_id: int) -> Any:
    message = decode_pb2.DecodeRequest()
    message.starts.add(stream_id=stream_id, token_ids=[1])
    return message


async def test_a_broken_protocol_ends_the_rpc_with_a_status() -> None:
    async with connected(Echo()) as peer:
        failed = grpc.StatusCode.FAILED_PRECONDITION
        assert await raw(peer) is failed
        assert await raw(peer, started(1)) is failed
        assert await raw(peer, opened(0)) is failed
        assert await raw(peer, opened(), opened()) is failed
        both = opened()
        both.starts.extend(started(1).starts)
        assert await raw(peer, both) is failed
        assert await raw(peer, opened(), started(1), started(1)) is failed
        assert await raw(peer, opened(), started(1), started(2)) is grpc.StatusCode.OK
        assert await raw(peer, opened(99), started(1)) is grpc.StatusCode.OK


async def test_a_peer_that_leaves_the_registry_finishes_what_it_has() -> None:
    echo, finish = Echo(), asyncio.Event()

    async def behave(start: Any, call: ServerCall) -> Completion:
        call.outbox.next().deltas.add(stream_id=call.stream_id, token_ids=[1])
        await finish.wait()
        return Completion(FinishReason.STOP)

    echo.behave = behave
    async with served(echo) as server, PeerPool.open("test", RpcConfig()) as pool:
        worker = Worker("decode-x", "e1", f"127.0.0.1:{server.port}")
        leaving = pool.get(worker)
        ask = Ask(leaving, [1])
        await ask.first.wait()
        pool.retain(())
        assert pool.get(worker) is not leaving
        finish.set()
        await ask.done()
