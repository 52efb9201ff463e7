"""The client half of a multiplexed stream. The protocol is written at `Open` in the protos.

What a caller gets is in `kvmesh.rpc.clients`; this is the part they share: numbering,
the one reader and one writer of a stream, and what happens when it breaks.
"""

import asyncio
import logging
from typing import Any, Generic, Protocol

import grpc.aio

from kvmesh.errors import MeshError, OverloadedError, ProtocolError, UnavailableError
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.specs import RequestT, ResponseT, StreamSpec
from kvmesh.rpc.status import from_rpc_error, from_status
from kvmesh.types import Completion
from kvmesh.wire import SCHEMA_REVISION, completion_from_proto

log = logging.getLogger(__name__)

MAX_STREAM_ID = 2**32 - 1


class Receiver(Protocol):
    """Gets what the server says about one request, in the stream's reader.

    Must not block and must not raise. After `end` nothing follows.
    """

    def item(self, item: Any) -> None:
        """Take one item message (a delta, a plan, a result)."""
        ...

    def end(self, outcome: Completion | MeshError) -> None:
        """Take the end: natural, or an error."""
        ...


class ClientStream(Generic[RequestT, ResponseT]):
    """One stream to one life of one server. Not reopened: a broken one stays broken.

    Callers add to the message that `start` returns, in the same loop turn.
    """

    def __init__(
        self, spec: StreamSpec[RequestT, ResponseT], peer_name: str, client_id: str, epoch: str
    ) -> None:
        self.outbox: Outbox[Any] = Outbox(spec.request)
        self.broken: MeshError | None = None
        self._spec = spec
        self._peer_name = peer_name
        self._client_id = client_id
        self._epoch = epoch
        self._live: dict[int, Receiver] = {}
        self._last_id = 0
        self._sequence = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def usable(self) -> bool:
        """Whether new requests may start here."""
        return self.broken is None and self._last_id < MAX_STREAM_ID

    def start(self, receiver: Receiver) -> tuple[int, Any]:
        """Number a new request; returns its id and the message to add its start to.

        Raises what broke the stream, if it is broken.
        """
        if self.broken is not None:
            raise self.broken
        message = self.outbox.next()
        self._last_id += 1
        self._live[self._last_id] = receiver
        self._quiet.clear()
        return self._last_id, message

    def is_live(self, stream_id: int) -> bool:
        """Whether the request has not ended, as far as is known here."""
        return stream_id in self._live

    def cancel(self, stream_id: int) -> None:
        """Ask the server to stop a request. Its end still comes. Unknown ids are ignored."""
        if stream_id in self._live and self.broken is None:
            self.outbox.next().cancels.append(stream_id)

    def abandon(self, stream_id: int) -> None:
        """Cancel a request whose end nobody waits for."""
        self.cancel(stream_id)
        if stream_id in self._live:
            self._live[stream_id] = _NOBODY

    async def quiet(self) -> None:
        """Wait until no request is live."""
        await self._quiet.wait()

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Carry the stream until it breaks or this is cancelled; then fail what is live."""
        rpc = getattr(self._spec.stub(channel), self._spec.name)()
        writer = asyncio.create_task(self._send(rpc))
        reader = asyncio.create_task(self._receive(rpc))
        error: MeshError = UnavailableError(f"the connection to {self._peer_name} was closed")
        try:
            await asyncio.wait({reader, writer}, return_when="FIRST_COMPLETED")
            error = self._why(reader, writer)
        finally:
            rpc.cancel()
            reader.cancel()
            writer.cancel()
            self._break(error)
            await asyncio.gather(reader, writer, return_exceptions=True)

    def handle(self, message: Any) -> None:
        """Take one message of the server, whole. Does no I/O."""
        self._sequence += 1
        if message.sequence != self._sequence:
            raise ProtocolError(f"message {message.sequence} came where {self._sequence} was due")
        if message.HasField("opened") and self._epoch and message.opened.epoch != self._epoch:
            raise UnavailableError(f"{self._peer_name} has restarted")
        live = self._live
        for item in getattr(message, self._spec.items):
            receiver = live.get(item.stream_id)
            if receiver is not None:
                receiver.item(item)
        for end in message.ends:
            receiver = live.pop(end.stream_id, None)
            if receiver is not None:
                receiver.end(_outcome(end))
        if not live:
            self._quiet.set()

    async def _send(self, rpc: Any) -> None:
        first: Any = self._spec.request()
        first.open.schema_revision = SCHEMA_REVISION
        first.open.client_id = self._client_id
        await rpc.write(first)
        await self.outbox.run(rpc.write)

    async def _receive(self, rpc: Any) -> None:
        async for message in rpc:
            self.handle(message)

    def _why(self, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> MeshError:
        # The reader knows the RPC's status; the writer only that it could not write.
        for task in (reader, writer):
            if not task.done():
                continue
            error = task.exception()
            if isinstance(error, grpc.aio.AioRpcError):
                return self._lost(from_rpc_error(error))
            if isinstance(error, MeshError):
                return self._lost(error)
            if error is not None and task is reader:
                log.error("stream to %s failed", self._peer_name, exc_info=error)
        return self._lost(UnavailableError("the stream ended"))

    def _lost(self, error: MeshError) -> MeshError:
        kind = OverloadedError if isinstance(error, OverloadedError) else UnavailableError
        return kind(f"lost the {self._spec.name} stream to {self._peer_name}: {error.message}")

    def _break(self, error: MeshError) -> None:
        self.broken = error
        live, self._live = self._live, {}
        for receiver in live.values():
            receiver.end(error)
        self._quiet.set()


class _Nobody:
    """Receives for a caller that has left."""

    def item(self, item: Any) -> None:
        """Drop it."""

    def end(self, outcome: Completion | MeshError) -> None:
        """Drop it."""


_NOBODY = _Nobody()


def _outcome(end: Any) -> Completion | MeshError:
    if end.WhichOneof("outcome") == "error":
        return from_status(end.error)
    return completion_from_proto(end.completion)
