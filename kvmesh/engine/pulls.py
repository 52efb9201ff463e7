"""The pulls of an engine that batches: how sequences get KV that others computed."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic

from kvmesh.engine.batch import Batch, S
from kvmesh.engine.handoff import Handoff, came_first, unpack
from kvmesh.engine.stepper import Stepper
from kvmesh.errors import MeshError, TransferError
from kvmesh.kv.base import StillWritingError

log = logging.getLogger(__name__)


class Pulls(Generic[S]):
    """A task for each sequence of `batch` that pulls; it runs once its blocks are here.

    `ended` is called with each when its pull has ended, and with what it failed with, if it
    did: such a one is removed, and one whose sink has gone meanwhile. `free` gets blocks that
    were still written to when their sequence ended.
    """

    def __init__(
        self,
        batch: Batch[S],
        handoff: Handoff,
        stepper: Stepper[S],
        *,
        ended: Callable[[S, Exception | None], None],
        free: Callable[[Sequence[int]], None],
    ) -> None:
        self._batch = batch
        self._handoff = handoff
        self._stepper = stepper
        self._ended = ended
        self._free = free
        self._tasks: dict[S, asyncio.Task[None]] = {}
        self._waiting: set[S] = set()

    def start(self, sequence: S) -> None:
        """Pull for a sequence that has its blocks."""
        self._tasks[sequence] = asyncio.create_task(self._pull(sequence), name="pull")

    def leave(self, sequence: S) -> None:
        """Wait no longer for a prompt that is being computed; a copy that runs goes on."""
        if sequence in self._waiting:
            self._tasks[sequence].cancel()

    async def settled(self, sequence: S) -> None:
        """Wait until nothing is pulled for a sequence."""
        if (task := self._tasks.get(sequence)) is not None:
            await asyncio.wait([task])

    async def aclose(self) -> None:
        """Wait until nothing is pulled any more; those that wait are left."""
        for sequence in tuple(self._waiting):
            self.leave(sequence)
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _pull(self, sequence: S) -> None:
        error: Exception | None = None
        try:
            await self._fetch(sequence)
        except MeshError as failure:
            error = failure
        except asyncio.CancelledError:  # nobody wants it any more
            self._batch.remove(sequence)
        except Exception as failure:  # the top of a background task
            log.exception("a pull failed")
            error = TransferError(f"the pull failed: {type(failure).__name__}")
        finally:
            self._waiting.discard(sequence)
            del self._tasks[sequence]
        if error is not None:
            self._batch.remove(sequence)
        self._ended(sequence, error)

    async def _fetch(self, sequence: S) -> None:
        ticket, size = sequence.ticket, self._batch.block_size
        assert ticket is not None  # only sequences with one are pulled for
        if came_first(ticket):
            if sequence.sink is None:  # gone before it could begin
                self._batch.remove(sequence)
                return
            self._waiting.add(sequence)
            await self._handoff.computed(ticket)
            self._waiting.discard(sequence)
        skip = sequence.computed // size
        blocks = sequence.blocks[skip : -(-sequence.prompt_length // size)]
        try:
            await self._handoff.pull(ticket, blocks, skip)
        except StillWritingError as error:
            kept, sequence.blocks = sequence.blocks, []
            error.settled.add_done_callback(lambda _: self._free(kept))
            raise
        if sequence.sink is None:
            self._batch.remove(sequence)
            return
        self._stepper.adopt(sequence, unpack(ticket.engine_params), blocks)
        self._batch.join(sequence)
