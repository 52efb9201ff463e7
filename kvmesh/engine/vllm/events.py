"""vLLM's KV events in the mesh's own block hashes. Imports no vLLM.

vLLM names a block by a digest of its own. `BlockMirror` keeps, per name, the mesh's
hash, computed from the token ids that vLLM sends along; it is pure. `KvEventReader`
feeds it from vLLM's socket and mends gaps from vLLM's replay buffer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvmesh.kv import blocks
from kvmesh.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT = 2.0  # seconds; the publisher answers between two batches
_END_OF_REPLAY = -1
_QUEUE_BATCHES = 100_000  # as vLLM's own; beyond it batches are lost, seen as a gap, and mended

Sink = Callable[[KvEvent], None]


class BlockMirror:
    """Which blocks vLLM has cached, told in the mesh's hashes.

    Blocks that the mesh can't name are left out: those of LoRA adapters or with a
    salt or media, and children of a block that was missed. That only hides a cached
    prefix, it never promises one that isn't there.
    """

    def __init__(self, block_size: int, salt: str) -> None:
        self._block_size = block_size
        self._seed = blocks.seed(salt)
        self._hashes: dict[int | bytes, int] = {}  # vLLM's name -> ours
        self._parents: dict[int, int] = {}  # ours -> its parent
        self._sinks: list[Sink] = []

    def snapshot(self) -> list[int]:
        """Return the hashes of all cached blocks, a parent before its children."""
        ordered: dict[int, None] = {}
        for tip in self._parents:
            block, lineage = tip, []
            while block in self._parents and block not in ordered:
                lineage.append(block)
                block = self._parents[block]
            ordered.update(dict.fromkeys(reversed(lineage)))
        return list(ordered)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Call `sink` with every later change; the result ends that."""
        self._sinks.append(sink)

        def unsubscribe() -> None:
            if sink in self._sinks:
                self._sinks.remove(sink)

        return unsubscribe

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        """Take in the events of one batch, in order. Unknown kinds are passed over."""
        for event in events:
            match event.get("type"):
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    self._remove(event)
                case "AllBlocksCleared":
                    self.clear()

    def clear(self) -> None:
        """Forget all blocks: they are gone, or no longer known."""
        if self._parents:
            self._hashes.clear()
            self._parents.clear()
            self._emit(BlocksCleared())

    def _store(self, event: dict[str, Any]) -> None:
        parent = self._parent_of(event)
        if parent is None:
            return
        names: Sequence[int | bytes] = event["block_hashes"]
        stored = []
        chained = blocks.block_hashes_from(parent, event["token_ids"], self._block_size)
        for name, block in zip(names, chained, strict=True):
            if block not in self._parents:
                self._parents[block] = parent
                stored.append(block)
            self._hashes[name] = parent = block
        if stored:
            self._emit(BlocksStored(stored))

    def _parent_of(self, event: dict[str, Any]) -> int | None:
        """Return the hash that the event's first block is chained to, None to skip it."""
        plain = event.get("lora_id") is None and not any(event.get("extra_keys") or ())
        if not plain or event["block_size"] != self._block_size or event.get("group_idx"):
            return None
        name = event.get("parent_block_hash")
        return self._seed if name is None else self._hashes.get(name)

    def _remove(self, event: dict[str, Any]) -> None:
        removed = []
        for name in event["block_hashes"]:
            block = self._hashes.pop(name, None)
            if block is not None and self._parents.pop(block, None) is not None:
                removed.append(block)
        if removed:
            self._emit(BlocksRemoved(removed))

    def _emit(self, event: KvEvent) -> None:
        for sink in tuple(self._sinks):
            sink(event)


class KvEventReader:
    """Reads vLLM's event socket into a mirror, in the event loop, until it is closed."""

    def __init__(self, mirror: BlockMirror, endpoint: str, replay_endpoint: str) -> None:
        self._mirror = mirror
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._expected = 0

    async def run(self) -> None:
        """Read until cancelled."""
        import msgspec
        from zmq.asyncio import Context
        from zmq.constants import SocketType

        context = Context()
        socket = context.socket(SocketType.SUB)
        try:
            socket.set_hwm(_QUEUE_BATCHES)
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            decode = msgspec.msgpack.Decoder().decode
            # The engine may have published before this socket was connected.
            await self._replay(context, decode)
            while True:
                _, sequence, payload = await socket.recv_multipart()
                await self._take(context, int.from_bytes(sequence, "big"), decode, payload)
        finally:
            context.destroy(linger=0)

    async def _take(
        self, context: Any, sequence: int, decode: Callable[[bytes], Any], payload: bytes
    ) -> None:
        if sequence < self._expected:
            return  # the replay had it
        if sequence > self._expected:
            await self._replay(context, decode)
        if sequence >= self._expected:
            self._advance(sequence, decode, payload)

    async def _replay(self, context: Any, decode: Callable[[bytes], Any]) -> None:
        """Take in what the publisher still has, from the expected batch on."""
        from zmq.constants import SocketType

        socket = context.socket(SocketType.DEALER)  # one request, many replies
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", self._expected.to_bytes(8, "big")])
            async with asyncio.timeout(_REPLAY_TIMEOUT):
                while True:
                    frames = await socket.recv_multipart()
                    sequence = int.from_bytes(frames[-2], "big", signed=True)
                    if sequence == _END_OF_REPLAY:
                        return
                    if sequence >= self._expected:
                        self._advance(sequence, decode, frames[-1])
        except TimeoutError:
            logger.warning("vLLM did not replay its KV events in time")
        finally:
            socket.close(linger=0)

    def _advance(self, sequence: int, decode: Callable[[bytes], Any], payload: bytes) -> None:
        if sequence > self._expected:
            logger.warning("KV events were lost; the prefix cache is told anew from here on")
            self._mirror.clear()
        self._expected = sequence + 1
        self._mirror.apply(decode(payload)[1])
