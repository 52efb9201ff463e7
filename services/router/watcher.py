"""Follows the event stream of every worker: one task for each life that is listed.

A stream that breaks, or falls silent, makes its worker a suspect at once: it gets no
requests until a new stream has brought a snapshot. So a killed worker leaves routing
before the registry notices.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvmesh.errors import MeshError
from kvmesh.types import Member, Worker, WorkerNews
from services.router.dispatcher import Dispatcher
from services.router.reservations import Life
from services.router.state import Applied

log = logging.getLogger(__name__)

Watch = Callable[[Worker], AsyncGenerator[WorkerNews, None]]
"""Opens one event stream. Raises `MeshError` when it breaks; closing it frees all."""


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """How workers are watched. They report once a second at least."""

    warm_seconds: float = field(
        default=1.0,
        metadata={
            "help": "longest wait at the start for what workers have cached; requests that came "
            "before would go to the few that have told",
            "min": 0.0,
        },
    )
    silence_seconds: float = field(
        default=5.0, metadata={"help": "silence after which a worker is a suspect", "min": 0.1}
    )
    retry_min_seconds: float = field(
        default=0.05, metadata={"help": "first pause before watching again", "min": 0.001}
    )
    retry_max_seconds: float = field(
        default=2.0, metadata={"help": "longest pause before watching again", "min": 0.001}
    )


class Watchers:
    """The watching tasks. An async context manager: leaving ends them all."""

    def __init__(
        self, dispatcher: Dispatcher, watch: Watch, config: WatchConfig, rng: random.Random
    ) -> None:
        self._dispatcher = dispatcher
        self._watch = watch
        self._config = config
        self._rng = rng
        self._watching: dict[Life, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._untold: set[Life] = set()
        self._all_told = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Do nothing: tasks start with the first membership."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all tasks and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def warm(self) -> None:
        """Wait until all listed workers have told what they have cached, or failed to.

        No longer than `warm_seconds`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.warm_seconds):
                await self._all_told.wait()

    def update_members(self, members: tuple[Member, ...]) -> None:
        """Hand a membership snapshot on, and watch exactly those that are to be watched."""
        self._dispatcher.update_members(members)
        wanted = self._dispatcher.watchable()
        for life in [life for life in self._watching if life not in wanted]:
            self._watching.pop(life).cancel()
            self._told(life)
        for life, member in wanted.items():
            if life not in self._watching:
                worker = Worker(member.id, member.epoch, member.address)
                task = asyncio.create_task(self._run(life, worker), name=f"watch {member.id}")
                self._watching[life] = task
                self._untold.add(life)
                self._all_told.clear()
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._told()

    def _told(self, life: Life | None = None) -> None:
        if life is not None:
            self._untold.discard(life)
        if not self._untold:
            self._all_told.set()

    async def _run(self, life: Life, worker: Worker) -> None:
        pause = self._config.retry_min_seconds
        try:
            while True:
                heard = await self._follow(life, worker)
                self._told(life)
                if heard:
                    pause = self._config.retry_min_seconds
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
                pause = min(2 * pause, self._config.retry_max_seconds)
        finally:
            self._dispatcher.suspect(life)

    async def _follow(self, life: Life, worker: Worker) -> bool:
        """Follow one stream to its end; return whether anything came of it."""
        attempt = _Attempt()
        try:
            applied = await self._listen(life, worker, attempt)
            if applied is Applied.GAP:
                # The worker is there; only what is known of its cache is out of date.
                log.warning("%s: missed events, asking for a snapshot", worker.id)
                return attempt.heard
            reason = "another life of it answered"
        except StopAsyncIteration:
            reason = "it ended the stream"
        except TimeoutError:
            reason = f"silent for {self._config.silence_seconds:g} s"
        except MeshError as error:
            reason = error.message
        except Exception:  # top of a background task
            log.exception("watching %s failed", worker.id)
            reason = "watching it failed"
        level = logging.WARNING if attempt.heard else logging.DEBUG
        log.log(level, "%s is suspect: %s", worker.id, reason)
        self._dispatcher.suspect(life)
        return attempt.heard

    async def _listen(self, life: Life, worker: Worker, attempt: "_Attempt") -> Applied:
        """Hand news on until some is not taken over; return why not."""
        async with aclosing(self._watch(worker)) as stream:
            while True:
                async with asyncio.timeout(self._config.silence_seconds):
                    news = await anext(stream)
                applied = self._dispatcher.apply(life, news)
                if applied is not Applied.OK:
                    return applied
                if not attempt.heard:
                    attempt.heard = True
                    self._told(life)


@dataclass(slots=True)
class _Attempt:
    """One stream: whether anything of it was taken over."""

    heard: bool = False
