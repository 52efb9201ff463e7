"""The server half of a multiplexed stream. The protocol is written at `Open` in the protos.

A servicer hands over what to do with a start (and, where the stream has them, with
further messages of a started request); ids, ends, cancels, deadlines and the drain are
handled here, once for all streams.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic

import grpc.aio

from kvmesh.clock import Clock
from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    InternalError,
    MeshError,
    ProtocolError,
)
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.specs import RequestT, ResponseT, StreamSpec
from kvmesh.rpc.status import to_status
from kvmesh.types import Completion, Context
from kvmesh.wire import SCHEMA_REVISION, completion_to_proto, context_from_proto

log = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 30.0
"""A client that opens an RPC and never says `open` is cut off after this."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who serves: the member's id and epoch, as told in `Opened`."""

    server_id: str
    epoch: str


class ServerCall:
    """One started request on a stream, from its start to its one end.

    A handler either answers on the spot and calls `end` or `fail` some time later, with
    `on_cancel` set to what frees everything; or it `spawn`s a coroutine whose return or
    error is the end, and which is cancelled when the caller cancels.
    """

    __slots__ = (
        "_stream",
        "_task",
        "_timer",
        "_verdict",
        "context",
        "ended",
        "on_cancel",
        "stream_id",
    )

    def __init__(self, stream: "ServerStream[Any, Any]", stream_id: int, context: Context) -> None:
        self.stream_id = stream_id
        self.context = context
        self.ended = False
        self.on_cancel: Callable[[], None] | None = None
        self._stream = stream
        self._task: asyncio.Task[Completion | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._verdict: MeshError | None = None

    @property
    def outbox(self) -> Outbox[Any]:
        """Where this request's items go; each takes its message from `outbox.next()`."""
        return self._stream.outbox

    def end(self, completion: Completion | None = None) -> None:
        """End naturally. Nothing may follow; later ends are ignored."""
        if self._leave():
            entry = self._stream.outbox.next().ends.add(stream_id=self.stream_id)
            completion_to_proto(completion or Completion(), entry.completion)

    def fail(self, error: MeshError) -> None:
        """End with an error. Nothing may follow; later ends are ignored."""
        if self._leave():
            entry = self._stream.outbox.next().ends.add(stream_id=self.stream_id)
            entry.error.CopyFrom(to_status(error))

    def spawn(self, work: Coroutine[Any, Any, Completion | None]) -> None:
        """Run `work` as this request's task; how it ends is how the request ends."""
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._done)

    def cancel(self, verdict: MeshError | None = None) -> None:
        """Stop the work; the request ends with `verdict` once all it held is free."""
        if self.ended:
            return
        self._verdict = self._verdict or verdict or CancelledByCallerError("cancelled")
        if self._task is not None:
            self._task.cancel()
            return
        if self.on_cancel is not None:
            self.on_cancel()
        self.fail(self._verdict)

    def arm(self, seconds: float) -> None:
        """Cancel with DEADLINE_EXCEEDED after `seconds`."""
        error = DeadlineError("the request's time is up")
        self._timer = asyncio.get_running_loop().call_later(seconds, self.cancel, error)

    def disarm(self) -> None:
        """Let the request outlast its deadline, for a client who will say when it is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self) -> bool:
        if self.ended:
            return False
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._stream.forget(self)
        return True

    def _done(self, task: asyncio.Task[Completion | None]) -> None:
        if task.cancelled():
            self.fail(self._verdict or CancelledByCallerError("cancelled"))
            return
        error = task.exception()
        if error is None:
            self.end(task.result())
        elif isinstance(error, MeshError):
            self.fail(error)
        else:
            log.error("request %s failed", _shown(self.context), exc_info=error)
            self.fail(InternalError("internal error"))


class ServerStream(Generic[RequestT, ResponseT]):
    """One client's open stream.

    `start` gets each start message with its new call; `feed`, where given, gets each
    whole message after its starts, to read what else is in it. Both run in the reader:
    they must not block. A `MeshError` from `start` ends that request alone.
    """

    def __init__(
        self,
        spec: StreamSpec[RequestT, ResponseT],
        start: Callable[[Any, ServerCall], None],
        *,
        identity: Identity,
        gate: Gate,
        clock: Clock,
        feed: "Callable[[Any, ServerStream[Any, Any]], None] | None" = None,
    ) -> None:
        self.outbox: Outbox[Any] = Outbox(spec.response)
        self.calls: dict[int, ServerCall] = {}
        self._spec = spec
        self._start = start
        self._feed = feed
        self._identity = identity
        self._gate = gate
        self._clock = clock
        self._last_id = 0
        self._sequence = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def run(
        self, requests: AsyncIterator[RequestT], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Serve the stream until the client is done or gone.

        Raises `ProtocolError` when the client breaks the protocol. Returns, or raises,
        only when nothing of the stream runs any more.
        """
        await self._open(requests, context)
        writer = asyncio.create_task(self.outbox.run(lambda m: self._write(context, m)))
        reader = asyncio.create_task(self._read(requests))
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when="FIRST_COMPLETED")
            self._raise_what_matters(reader if reader in done else writer)
        finally:
            await self._close(reader, writer)

    def handle(self, message: Any) -> None:
        """Take one message of the client, whole. Does no I/O."""
        if message.HasField("open"):
            raise ProtocolError("open was sent twice")
        for start in message.starts:
            self._begin(start)
        if self._feed is not None:
            self._feed(message, self)
        for stream_id in message.cancels:
            call = self.calls.get(stream_id)
            if call is not None:
                call.cancel()

    def forget(self, call: ServerCall) -> None:
        """Drop an ended call. For `ServerCall` alone."""
        del self.calls[call.stream_id]
        self._gate.leave()
        if not self.calls:
            self._empty.set()

    def _begin(self, start: Any) -> None:
        if start.stream_id <= self._last_id:
            raise ProtocolError(f"stream_id {start.stream_id} is not above {self._last_id}")
        self._last_id = start.stream_id
        context = context_from_proto(start.context, self._clock)
        call = ServerCall(self, start.stream_id, context)
        try:
            self._gate.enter()
        except MeshError as error:
            entry = self.outbox.next().ends.add(stream_id=start.stream_id)
            entry.error.CopyFrom(to_status(error))
            return
        self.calls[call.stream_id] = call
        self._empty.clear()
        try:
            if context.deadline is not None:
                self._arm(call, context.deadline - self._clock.now())
            self._start(start, call)
        except MeshError as error:
            call.fail(error)
        except Exception:  # top of a request
            log.exception("request %s failed at its start", _shown(context))
            call.fail(InternalError("internal error"))

    def _arm(self, call: ServerCall, seconds: float) -> None:
        if seconds <= 0:
            raise DeadlineError("the request's time was up when it arrived")
        call.arm(seconds)

    async def _open(self, requests: AsyncIterator[RequestT], context: Any) -> None:
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_SECONDS):
                first: Any = await anext(requests)
        except StopAsyncIteration:
            raise ProtocolError("the stream ended before open") from None
        except TimeoutError:
            raise ProtocolError("no open was sent") from None
        if not first.HasField("open") or first.open.schema_revision < 1:
            raise ProtocolError("the first message must be open, with a schema_revision >= 1")
        if len(first.ListFields()) > 1:  # would wait for an answer for ever
            raise ProtocolError("open must come alone")
        reply: Any = self._spec.response()
        reply.opened.schema_revision = min(SCHEMA_REVISION, first.open.schema_revision)
        reply.opened.server_id = self._identity.server_id
        reply.opened.epoch = self._identity.epoch
        await self._write(context, reply)

    async def _write(self, context: Any, message: Any) -> None:
        self._sequence += 1
        message.sequence = self._sequence
        await context.write(message)

    async def _read(self, requests: AsyncIterator[RequestT]) -> None:
        async for message in requests:
            self.handle(message)
        await self._empty.wait()
        await self.outbox.flushed()

    def _raise_what_matters(self, task: asyncio.Task[None]) -> None:
        error = task.exception()
        if isinstance(error, MeshError):
            raise error
        if error is not None:
            # gRPC has several exceptions, public and not, for "the client has gone".
            log.info("a %s stream was lost: %s", self._spec.name, type(error).__name__)

    async def _close(self, *own: asyncio.Task[None]) -> None:
        tasks: set[asyncio.Task[Any]] = set(own)
        for task in own:
            task.cancel()
        for call in list(self.calls.values()):
            if call._task is not None:
                tasks.add(call._task)
            call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shown(context: Context) -> str:
    """Return a request's id for logs, if it is one of ours: callers write what they like."""
    return context.request_id if _OWN_ID.fullmatch(context.request_id) else "with a caller's id"


_OWN_ID = re.compile(r"[0-9a-f]{32}")
