"""Blocking work off the event loop, in two lanes: long pieces never delay short ones.

A lane has one thread and takes what has gathered in batches, one hop to the thread for
each: an idle lane works at once, a busy one batches by itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvmesh.errors import InternalError, MeshError, OverloadedError

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_SIZE = 16_000
"""Sizes of the jobs in one hop to a thread, in all: some 5 ms of encoding."""

RETRY_AFTER_SECONDS = 1.0


@dataclass(slots=True)
class Job(Generic[T]):
    """One piece of work. `size` says how long it takes, about one for a character of text;
    with `slow` it may take long whatever its size.

    `done` is called in the event loop with what `work` returned or raised, exactly once,
    unless `cancelled` was set before; then `work` may not have run.
    """

    size: int
    work: Callable[[], T]
    done: Callable[[T | MeshError], None]
    slow: bool = False
    cancelled: bool = False


class Lanes:
    """A lane for short jobs and one for long ones. Open while its context is.

    Jobs of `long_size` and more, and slow ones, go to the long lane. At most `max_waiting`
    jobs wait, of `max_waiting_size` in all. Leaving drops what waits and ends the threads.
    """

    def __init__(self, *, long_size: int, max_waiting: int, max_waiting_size: int) -> None:
        self._long_size = long_size
        self._max_waiting = max_waiting
        self._max_waiting_size = max_waiting_size
        self._short = _Lane("short")
        self._long = _Lane("long")
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(lane.run()) for lane in (self._short, self._long)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken up yet."""
        return len(self._short.queue) + len(self._long.queue)

    def submit(self, job: Job[Any]) -> None:
        """Queue a job. Raises `OverloadedError` when too many or too long ones wait."""
        lane = self._long if job.slow or job.size >= self._long_size else self._short
        size = self._short.size + self._long.size + job.size
        # One alone is always taken: its own size is limited elsewhere.
        if self.waiting and (self.waiting >= self._max_waiting or size > self._max_waiting_size):
            raise OverloadedError(
                "too many prompts wait to be encoded", retry_after=RETRY_AFTER_SECONDS
            )
        lane.put(job)

    async def failed(self) -> None:
        """Wait until a lane has broken down, which only a bug can do; raise why."""
        done, _ = await asyncio.wait(self._tasks, return_when="FIRST_COMPLETED")
        for task in done:
            task.result()


class _Lane:
    """A queue and the task that works it off in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.queue: deque[Job[Any]] = deque()
        self.size = 0
        self._name = name
        self._wake = asyncio.Event()

    def put(self, job: Job[Any]) -> None:
        """Append a job."""
        self.queue.append(job)
        self.size += job.size
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled; what the thread is in the middle of is waited for."""
        thread = ThreadPoolExecutor(1, f"lane-{self._name}")
        try:
            await self._run(thread)
        finally:
            await asyncio.to_thread(thread.shutdown)

    async def _run(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._take():
                outcomes = await loop.run_in_executor(thread, _run, batch)
                for job, outcome in zip(batch, outcomes, strict=True):
                    if not job.cancelled:
                        job.done(outcome)

    def _take(self) -> list[Job[Any]]:
        """Take the next batch: in order, without cancelled jobs, at least one if any."""
        batch: list[Job[Any]] = []
        total = 0
        while self.queue and (not batch or total + self.queue[0].size <= BATCH_SIZE):
            job = self.queue.popleft()
            self.size -= job.size
            if not job.cancelled:
                batch.append(job)
                total += job.size
        return batch


def _run(batch: Sequence[Job[Any]]) -> list[Any]:
    """Run the jobs in this thread, each on its own account."""
    return [_outcome(job) for job in batch]


def _outcome(job: Job[Any]) -> Any:
    if job.cancelled:
        return InternalError("cancelled before it ran")
    try:
        return job.work()
    except MeshError as error:
        return error
    except Exception:  # top of a request
        log.exception("encoding failed")
        return InternalError("internal error")
