"""Reading vLLM's event socket: what came before, what was lost, what is replayed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from zmq.constants import SocketType

from kvmesh.engine.vllm.events import BlockMirror, KvEventReader
from kvmesh.kv.blocks import block_hashes
from kvmesh.types import BlocksCleared, BlocksStored, KvEvent

END = (-1).to_bytes(8, "big", signed=True)
TOKENS = list(range(20))
OURS = block_hashes(TOKENS, 2, "model")


class Publisher:
    """Speaks as vLLM's publisher does: numbered batches, and a buffer to replay."""

    def __init__(self, directory: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{directory}/kv", f"ipc://{directory}/replay"
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(SocketType.XPUB)  # as PUB, but tells of subscribers
        self._replay = self._context.socket(SocketType.ROUTER)
        self._pub.bind(self.endpoint)
        self._replay.bind(self.replay_endpoint)
        self.buffer: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self._next = 0

    async def publish(self, block: int, *, lost: bool = False) -> None:
        """Publish that one more block of the chain was stored."""
        event = {
            "type": "BlockStored",
            "block_hashes": [1000 + block],
            "parent_block_hash": 999 + block if block else None,
            "token_ids": TOKENS[2 * block : 2 * block + 2],
            "block_size": 2,
        }
        payload = msgspec.msgpack.encode([0.0, [event], 0])
        self.buffer.append((self._next, payload))
        if not lost:
            await self._pub.send_multipart([b"", self._next.to_bytes(8, "big"), payload])
        self._next += 1

    async def subscribed(self) -> None:
        await self._pub.recv()

    async def serve_replays(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for sequence, payload in self.buffer:
                if sequence >= self.asked[-1]:
                    number = sequence.to_bytes(8, "big")
                    await self._replay.send_multipart([client, b"", b"", number, payload])
            await self._replay.send_multipart([client, b"", b"", END, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


class Reading:
    """A reader at work on a publisher, and what it told."""

    def __init__(self, publisher: Publisher) -> None:
        self.events: asyncio.Queue[KvEvent] = asyncio.Queue()
        self.mirror = BlockMirror(2, "model")
        self.mirror.subscribe(self.events.put_nowait)
        reader = KvEventReader(self.mirror, publisher.endpoint, publisher.replay_endpoint)
        self._tasks = [
            asyncio.create_task(work) for work in (publisher.serve_replays(), reader.run())
        ]

    async def next(self) -> KvEvent:
        async with asyncio.timeout(20):
            return await self.events.get()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    opened = Publisher(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
async def reading(publisher: Publisher) -> AsyncIterator[Any]:
    await publisher.publish(0)  # before anyone listens
    opened = Reading(publisher)
    await publisher.subscribed()
    assert await opened.next() == BlocksStored(OURS[:1])
    yield opened
    await opened.aclose()


async def test_events_come_in_order(publisher: Publisher, reading: Reading) -> None:
    for block in (1, 2, 3):
        await publisher.publish(block)
        assert await reading.next() == BlocksStored(OURS[block : block + 1])
    assert reading.mirror.snapshot() == OURS[:4]
    assert publisher.asked == [0]


async def test_lost_events_are_replayed(publisher: Publisher, reading: Reading) -> None:
    await publisher.publish(1, lost=True)
    await publisher.publish(2, lost=True)
    await publisher.publish(3)
    told = [await reading.next() for _ in range(3)]
    assert told == [BlocksStored(OURS[block : block + 1]) for block in (1, 2, 3)]
    assert publisher.asked == [0, 1]
    await publisher.publish(4)
    assert await reading.next() == BlocksStored(OURS[4:5])


async def test_what_can_not_be_replayed_clears_all(publisher: Publisher, reading: Reading) -> None:
    await publisher.publish(1, lost=True)
    publisher.buffer.clear()
    await publisher.publish(2)  # its parent is no longer known
    assert await reading.next() == BlocksCleared()
    await publisher.publish(0)
    assert await reading.next() == BlocksStored(OURS[:1])
    assert reading.mirror.snapshot() == OURS[:1]
