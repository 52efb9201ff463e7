"""Router, prefill and decode services that do what a test tells them.

A token is a byte of UTF-8. Each fake keeps what it was asked (`starts`), what runs in it
(`live`) and what was cancelled in it (`cancelled`, by request id).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from kvmesh.errors import MeshError, UnavailableError
from kvmesh.host.process import Process, Service
from kvmesh.rpc.serving import ServerCall, ServerStream
from kvmesh.rpc.specs import DECODE, PREFILL, ROUTE, StreamSpec
from kvmesh.types import (
    Completion,
    FinishReason,
    KvTicket,
    Leg,
    Plan,
    Role,
    TokenLogprob,
    Usage,
)
from kvmesh.v1 import (
    decode_pb2_grpc,
    prefill_pb2_grpc,
    router_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from kvmesh.wire import LEG_FROM_PROTO, plan_to_proto, ticket_to_proto
from kvmesh.wire_logprobs import logprobs_to_proto

MODEL = "fake-model"

POLL_SECONDS = 0.005

CACHED_TOKENS = 5
"""Tokens of each prompt that a fake decode worker says it had cached."""


class Fake:
    """What all fakes have in common. `app` is what a mesh starts."""

    role: Role

    def __init__(self, **details: Any) -> None:
        self.details = details
        self.starts: list[Any] = []
        self.live = 0
        self.cancelled: list[str] = []
        self.refuses: MeshError | None = None
        self.ignores_deadlines = False
        self._process: Process | None = None

    @asynccontextmanager
    async def app(self, config: Any, process: Process) -> AsyncIterator[Service]:
        """Serve."""
        self._process = process
        yield Service(self.registrations(), self.details)

    def registrations(self) -> dict[str, Any]:
        """Return what is to be served."""
        raise NotImplementedError

    async def until(self, what: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until `what` is true, looking often."""
        async with asyncio.timeout(seconds):
            while True:
                if what():
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def idle(self) -> None:
        """Wait until nothing runs here."""
        await self.until(lambda: not self.live)

    def stream(
        self, spec: StreamSpec[Any, Any], start: Callable[[Any, ServerCall], None], feed: Any = None
    ) -> ServerStream[Any, Any]:
        """Return the server half of one client's stream."""
        process = self._process
        assert process is not None
        return ServerStream(
            spec,
            start,
            identity=process.identity,
            gate=process.gate,
            clock=_Backwards() if self.ignores_deadlines else process.clock,
            feed=feed,
        )

    @contextmanager
    def running(self, call: ServerCall) -> Iterator[None]:
        """Count a call for as long as the block runs."""
        self.live += 1
        try:
            yield
        except asyncio.CancelledError:
            self.cancelled.append(call.context.request_id)
            raise
        finally:
            self.live -= 1


class _Backwards:
    """A clock on which every deadline is a long way off, and moves away."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now -= 1e6
        return self._now

    def wall(self) -> float:
        return 0.0


class FakeRouter(Fake, router_pb2_grpc.RouterServiceServicer):
    """Answers with `plan(start)`, and keeps reservations until they are cancelled."""

    role = Role.ROUTER

    def __init__(self, plan: Callable[[Any], Plan]) -> None:
        super().__init__()
        self.plan = plan
        self.prefilled: list[int] = []
        self.generating: list[int] = []
        self.failed: list[Leg] = []
        self.timed_out: list[Leg] = []
        self.hold = False

    def registrations(self) -> dict[str, Any]:
        """Return the one service."""
        add = router_pb2_grpc.add_RouterServiceServicer_to_server
        return {"kvmesh.v1.RouterService": partial(add, self)}

    async def Route(self, requests: Any, context: Any) -> None:
        """Serve the rpc."""
        await self.stream(ROUTE, self._start, self._feed).run(requests, context)

    def _start(self, start: Any, call: ServerCall) -> None:
        self.starts.append(start)
        if self.refuses is not None:
            raise self.refuses
        if not self.hold:
            plan = self.plan(start)
            plan_to_proto(plan, call.outbox.next().plans.add(stream_id=call.stream_id))
            call.disarm()
        self.live += 1
        call.on_cancel = partial(self._over, call)

    def _feed(self, message: Any, stream: Any) -> None:
        for progress in message.progress:
            if progress.prefilled:
                self.prefilled.append(progress.stream_id)
            if progress.generating:
                self.generating.append(progress.stream_id)
            leg = LEG_FROM_PROTO.get(progress.failed_leg)
            if leg is not None:
                (self.timed_out if progress.timed_out else self.failed).append(leg)

    def _over(self, call: ServerCall) -> None:
        self.live -= 1
        self.cancelled.append(call.context.request_id)


class FakeWorker(Fake, worker_pb2_grpc.WorkerServiceServicer):
    """What fake prefill and decode workers have in common."""

    def __init__(self, model: str = MODEL, **details: Any) -> None:
        super().__init__(model=model, block_size=16, context_length=8192, **details)
        self.released: list[str] = []

    def worker_registration(self) -> dict[str, Any]:
        """Return the registration of `WorkerService`."""
        add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
        return {"kvmesh.v1.WorkerService": partial(add, self)}

    async def ReleaseKv(self, request: Any, context: Any) -> Any:
        """Note the release."""
        self.released.append(request.ticket_id)
        return worker_pb2.ReleaseKvResponse(released=True)


class FakePrefill(FakeWorker):
    """Answers each prompt with a ticket, and with `first` tokens."""

    role = Role.PREFILL

    def __init__(self, model: str = MODEL) -> None:
        super().__init__(model)
        self.first: Sequence[int] = ()
        self.finish: FinishReason | None = None
        self.hold: asyncio.Event | None = None
        self.given = 0
        """Tickets given out: `ticket-1` and so on."""
        self.early = False
        """Whether the ticket comes first, and only then what `hold` waits for."""
        self.failure: MeshError | None = None
        """What a prompt fails with after its ticket."""
        self.after_cancel = False
        """Whether a cancelled prompt is answered all the same, as if the answer had crossed."""

    def registrations(self) -> dict[str, Any]:
        """Return both services."""
        add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        return {"kvmesh.v1.PrefillService": partial(add, self), **self.worker_registration()}

    async def Prefill(self, requests: Any, context: Any) -> None:
        """Serve the rpc."""
        await self.stream(PREFILL, self._start).run(requests, context)

    def _start(self, start: Any, call: ServerCall) -> None:
        self.starts.append(start)
        if self.refuses is not None:
            raise self.refuses
        call.spawn(self._prefill(start, call))

    async def _prefill(self, start: Any, call: ServerCall) -> Completion:
        if self.early:
            self._answer(start, call)
        with self.running(call):
            try:
                if self.hold is not None:
                    await self.hold.wait()
            except asyncio.CancelledError:
                if self.after_cancel:
                    self._answer(start, call)
                raise
        if self.failure is not None:
            raise self.failure
        if not self.early:
            self._answer(start, call)
        return Completion(self.finish, Usage(len(start.token_ids), len(self.first)))

    def _answer(self, start: Any, call: ServerCall) -> None:
        assert self._process is not None
        result = call.outbox.next().results.add(
            stream_id=call.stream_id,
            first_token_ids=self.first,
            cached_tokens=3,
            computing=self.early,
        )
        if self.finish is None:
            self.given += 1
            ticket = KvTicket(
                ticket_id=f"ticket-{self.given}",
                worker_id=self._process.id,
                epoch=self._process.epoch,
                backend="local",
                engine="fake",
                layout_fingerprint="fake",
                prompt_tokens=len(start.token_ids),
                block_count=1,
                byte_count=1,
                lease_expire_time=self._process.clock.wall() + 30,
                first_token_ids=tuple(self.first),
            )
            ticket_to_proto(ticket, result.ticket)


Script = Callable[["FakeDecode", Any, "Emit"], Awaitable[FinishReason]]
Emit = Callable[[Sequence[int]], None]


class FakeDecode(FakeWorker):
    """Generates what its `script` emits; by default the text of `answer`, at once.

    `script(fake, start, emit)` emits tokens, awaits what it likes, and returns how it
    ended, or raises a `MeshError`.
    """

    role = Role.DECODE

    def __init__(self, answer: str = "Hello, world!", model: str = MODEL) -> None:
        super().__init__(model)
        self.answer = answer
        self.script: Script = say
        self.gate = asyncio.Event()
        """For scripts that are to wait for the test."""
        self.stop_token: int | None = None

    def registrations(self) -> dict[str, Any]:
        """Return both services."""
        add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        return {"kvmesh.v1.DecodeService": partial(add, self), **self.worker_registration()}

    async def Decode(self, requests: Any, context: Any) -> None:
        """Serve the rpc."""
        await self.stream(DECODE, self._start).run(requests, context)

    def _start(self, start: Any, call: ServerCall) -> None:
        self.starts.append(start)
        if self.refuses is not None:
            raise self.refuses
        call.spawn(self._decode(start, call))

    async def _decode(self, start: Any, call: ServerCall) -> Completion:
        sent = 0

        def emit(token_ids: Sequence[int]) -> None:
            nonlocal sent
            delta = call.outbox.next().deltas.add(
                stream_id=call.stream_id, offset=sent, token_ids=token_ids
            )
            if not sent:
                delta.cached_tokens = CACHED_TOKENS
            if start.sampling.HasField("logprobs"):
                logprobs_to_proto([row(t, start.sampling.logprobs) for t in token_ids], delta)
            sent += len(token_ids)

        with self.running(call):
            if start.sampling.HasField("prompt_logprobs"):
                ids = start.token_ids[1:]
                delta = call.outbox.next().deltas.add(
                    stream_id=call.stream_id, offset=1, token_ids=ids, prompt=True
                )
                logprobs_to_proto([row(t, start.sampling.prompt_logprobs) for t in ids], delta)
            finish = await self.script(self, start, emit)
        before = len(start.ticket.first_token_ids or start.generated_token_ids)
        usage = Usage(len(start.token_ids), before + sent, CACHED_TOKENS)
        return Completion(finish, usage, self.stop_token)


def row(token: int, count: int) -> TokenLogprob:
    """Return what fake workers say of a token: the likelier, the smaller its id."""
    top = tuple((token + n, -(token + n) / 100) for n in range(count))
    return TokenLogprob(-token / 100, top, token + 1)


async def say(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
    """Emit the answer, or what is missing of it, four tokens a step, cut at max_tokens."""
    ids = fake.answer.encode()
    limit = start.sampling.max_tokens if start.sampling.HasField("max_tokens") else len(ids)
    for at in range(len(start.generated_token_ids), min(limit, len(ids)), 4):
        emit(ids[at : min(at + 4, limit)])
        await asyncio.sleep(0)
    return FinishReason.LENGTH if limit < len(ids) else FinishReason.STOP


async def babble(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
    """Emit the answer and go on until cancelled, or until the test opens the gate."""
    emit(fake.answer.encode())
    await fake.gate.wait()
    return FinishReason.STOP


async def stall(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
    """Emit nothing until the test opens the gate, then the answer."""
    await fake.gate.wait()
    return await say(fake, start, emit)


async def die(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
    """Fail before the first token."""
    raise UnavailableError("the worker is going away")


async def die_later(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
    """Emit some tokens, and fail when the test opens the gate."""
    emit(fake.answer.encode()[:5])
    await fake.gate.wait()
    raise UnavailableError("the worker is going away")
