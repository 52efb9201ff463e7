"""How workers tell routers of themselves: streams of news that are late, and lose some."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from kvmesh.host.worker import BATCH_SECONDS, LOAD_SECONDS, QUIET_LOOKS
from kvmesh.types import CacheSnapshot, KvEvent, Load, WorkerEvent, WorkerNews


@dataclass(frozen=True, slots=True)
class Wire:
    """What messages go through: each is `delay` to `delay + jitter` seconds late, in order.

    `loss` is the share of messages of worker events that never arrive.
    """

    delay: float = 0.001
    jitter: float = 0.0
    loss: float = 0.0


class Publisher:
    """A worker's side of all streams. `load` and `snapshot` say how things are now."""

    def __init__(
        self,
        worker_id: str,
        epoch: str,
        load: Callable[[], Load],
        snapshot: Callable[[], list[int]],
        wire: Wire,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.load = load
        self.snapshot = snapshot
        self.wire = wire
        self.streams = 0
        """Streams that were ever opened."""
        self._feeds: list[_Feed] = []
        self._looking = False

    def publish(self, event: KvEvent) -> None:
        """Tell all of a change of the cache, soon."""
        for feed in self._feeds:
            feed.add(event)

    async def stream(self, rng: random.Random) -> AsyncGenerator[WorkerNews, None]:
        """Yield a snapshot, then news as they arrive. `rng` decides what is late and lost."""
        self.streams += 1
        feed = _Feed(self, rng)
        self._feeds.append(feed)
        self._look_later()
        try:
            while True:
                yield await feed.next()
        finally:
            self._feeds.remove(feed)

    def _look_later(self) -> None:
        if not self._looking and self._feeds:
            self._looking = True
            asyncio.get_running_loop().call_later(LOAD_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = False
        load = self.load()
        for feed in self._feeds:
            feed.look(load)
        self._look_later()


class _Feed:
    """One router's stream. News gather for a moment, as real ones do."""

    def __init__(self, publisher: Publisher, rng: random.Random) -> None:
        self._publisher = publisher
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._gathering = False
        self._pending: list[WorkerEvent] = []
        self._sequence = 0
        self._told = Load()
        self._quiet = 0
        self._last = 0.0
        self._arrived: deque[WorkerNews] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.add(CacheSnapshot(publisher.snapshot()))

    def add(self, event: WorkerEvent) -> None:
        """Send an event with the next message."""
        self._pending.append(event)
        if not self._gathering:
            self._gathering = True
            self._loop.call_later(BATCH_SECONDS, self._send)

    def look(self, load: Load) -> None:
        """Send the load if it has changed, and now and then anyhow."""
        self._quiet += 1
        if not self._gathering and (load != self._told or self._quiet >= QUIET_LOOKS):
            self._send()

    async def next(self) -> WorkerNews:
        """Return the next message, as soon as it is there."""
        while not self._arrived:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._arrived.popleft()

    def _send(self) -> None:
        self._gathering = False
        self._quiet = 0
        self._sequence += 1
        events, self._pending = self._pending, []
        publisher, wire = self._publisher, self._publisher.wire
        self._told = publisher.load()
        if wire.loss and self._rng.random() < wire.loss:
            return
        news = WorkerNews(
            publisher.worker_id, publisher.epoch, self._sequence, (*events, self._told)
        )
        at = self._loop.time() + wire.delay
        if wire.jitter:
            at += self._rng.uniform(0, wire.jitter)
        self._last = at = max(at, self._last)
        self._loop.call_at(at, self._deliver, news)

    def _deliver(self, news: WorkerNews) -> None:
        self._arrived.append(news)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
