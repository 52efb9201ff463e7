"""How callers wait for what a multiplexed stream brings: one value, or many."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvmesh.errors import MeshError, ProtocolError, SlowReaderError
from kvmesh.rpc.calling import ClientStream
from kvmesh.types import Completion

ValueT = TypeVar("ValueT")

MAX_UNREAD_ITEMS = 4096
"""Items of one request that its reader has not taken; past it the request fails."""


class Call(ABC):
    """One request on a stream, open from its start to its end.

    An async context manager: leaving it before the end cancels the request.
    """

    def __init__(self, stream: ClientStream[Any, Any]) -> None:
        self.stream = stream
        self.stream_id, self.request = stream.start(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancel the request, if it has not ended, without waiting for its end."""
        self.stream.abandon(self.stream_id)

    @abstractmethod
    def item(self, item: Any) -> None:
        """Take an item of the stream."""

    @abstractmethod
    def end(self, outcome: Completion | MeshError) -> None:
        """Take the end of the stream."""


class ValueCall(Call, Generic[ValueT]):
    """A request that is answered by one item; `read` turns its message into a value."""

    def __init__(self, stream: ClientStream[Any, Any], read: Callable[[Any], ValueT]) -> None:
        self.value: asyncio.Future[ValueT] = asyncio.get_running_loop().create_future()
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._read = read
        super().__init__(stream)

    def item(self, item: Any) -> None:
        """Resolve the value."""
        if not self.value.done():
            self.value.set_result(self._read(item))

    def end(self, outcome: Completion | MeshError) -> None:
        """Resolve the end; without a value before it, that fails too."""
        if isinstance(outcome, MeshError):
            _fail(self.value, outcome)
            _fail(self.completion, outcome)
            return
        _fail(self.value, ProtocolError("the request ended without an answer"))
        if not self.completion.done():
            self.completion.set_result(outcome)


class BatchCall(Call, Generic[ValueT]):
    """A request that is answered by many items, read in batches of what has come."""

    def __init__(self, stream: ClientStream[Any, Any], read: Callable[[Any], ValueT]) -> None:
        self._read = read
        self._items: list[ValueT] = []
        self._outcome: Completion | MeshError | None = None
        self._interruption: MeshError | None = None
        self._wake = asyncio.Event()
        super().__init__(stream)

    def item(self, item: Any) -> None:
        """Keep the item for the reader; give the request up if too many are kept."""
        if len(self._items) >= MAX_UNREAD_ITEMS:
            self.end(SlowReaderError("the reader of this request fell behind"))
            self.leave()
            return
        self._items.append(self._read(item))
        self._wake.set()

    def end(self, outcome: Completion | MeshError) -> None:
        """Keep the end for the reader; the first one stands."""
        if self._outcome is None:
            self._outcome = outcome
            self._wake.set()

    def interrupt(self, error: MeshError) -> None:
        """Make `next` raise `error` once, after what has come. The call stays open."""
        self._interruption = error
        self._wake.set()

    def wake(self) -> None:
        """Make whoever waits in `woken` or `next` look around."""
        self._wake.set()

    async def woken(self) -> None:
        """Wait until `next` would return at once, taking nothing."""
        await self._wake.wait()

    async def next(self) -> tuple[list[ValueT], Completion | None]:
        """Wait for news; return all that has come, and the end once it is there.

        Raises the error the request ended with, or an interruption, after what came
        before it was read. Returns nothing new after a `wake`.
        """
        await self._wake.wait()
        self._wake.clear()
        items, self._items = self._items, []
        outcome = self._outcome or self._interruption
        if outcome is None:
            return items, None
        if isinstance(outcome, Completion):
            self._wake.set()
            return items, outcome
        if items or self._outcome is not None:
            self._wake.set()
        if items:
            return items, None
        self._interruption = None
        raise outcome


def _fail(future: asyncio.Future[Any], error: MeshError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # read once, so that nobody is warned of an unread one
