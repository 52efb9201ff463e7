"""How every sender of the mesh sends: one pending message, one event, one writer.

Callers add to the pending message and never wait. The writer task sends what has
gathered since its last write as one message: an idle stream sends single tokens at
once, a busy one batches by itself. Nothing is held back to fill a batch.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvmesh.errors import OverloadedError

MAX_ENTRIES = 256
"""Entries (starts, deltas, ends) in one message: keeps it far below gRPC's limit."""

MAX_BACKLOG = 256
"""Full messages waiting behind a peer that does not read, before its stream is given up."""

MessageT = TypeVar("MessageT")


class Outbox(Generic[MessageT]):
    """The pending messages of one direction of one stream.

    `slots` maps a stream id to that request's entry in the message that `next` would
    return, so that a further delta can join it; it is emptied when the message goes.
    """

    def __init__(self, new: Callable[[], MessageT], max_entries: int = MAX_ENTRIES) -> None:
        self.slots: dict[int, object] = {}
        self._new = new
        self._max_entries = max_entries
        self._pending: deque[MessageT] = deque()
        self._entries = 0
        self._overflow = False
        self._writer: asyncio.Task[object] | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def next(self) -> MessageT:
        """Return the message to add exactly one entry to, in this loop turn.

        Never fails: when the peer has not read for so long that the backlog is full,
        the stream is beyond saving, `run` raises, and what is added here is dropped.
        """
        if not self._pending or self._entries >= self._max_entries:
            if len(self._pending) >= MAX_BACKLOG:
                self._give_up()
            if self._overflow:
                return self._new()
            self._append()
        self._entries += 1
        return self._pending[-1]

    async def run(self, write: Callable[[MessageT], Awaitable[object]]) -> None:
        """Send until cancelled. Raises what `write` raises, `OverloadedError` when the
        peer does not read.
        """
        self._writer = asyncio.current_task()
        try:
            await self._run(write)
        except asyncio.CancelledError:
            if self._overflow:
                raise OverloadedError("the peer does not read its stream") from None
            raise

    async def flushed(self) -> None:
        """Wait until all that was added has been written."""
        await self._idle.wait()

    async def _run(self, write: Callable[[MessageT], Awaitable[object]]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                message = self._pending.popleft()
                if not self._pending:
                    self._entries = 0
                    self.slots.clear()
                await write(message)
            self._idle.set()

    def _append(self) -> None:
        self._pending.append(self._new())
        self._entries = 0
        self.slots.clear()
        self._idle.clear()
        self._wake.set()

    def _give_up(self) -> None:
        self._overflow = True
        if self._writer is not None:
            self._writer.cancel()
