"""Connections to other processes: one `Peer` per life of a process, kept in a pool."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio

from kvmesh.rpc.calling import ClientStream
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.specs import RequestT, ResponseT, StreamSpec
from kvmesh.types import Worker


class Peer:
    """One channel to one life of one process, and the streams on it.

    Made without I/O; connects when first used. `epoch` empty: any life will do.
    """

    def __init__(self, worker: Worker, client_id: str, config: RpcConfig) -> None:
        self.worker = worker
        self._client_id = client_id
        self._config = config
        self._channel: grpc.aio.Channel | None = None
        self._streams: dict[str, ClientStream[Any, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, made now if it was not used before."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                self.worker.address, options=self._config.channel_options()
            )
        return self._channel

    def stream(self, spec: StreamSpec[RequestT, ResponseT]) -> ClientStream[RequestT, ResponseT]:
        """Return the open stream of this kind, or a new one where it has broken."""
        stream = self._streams.get(spec.name)
        if stream is None or not stream.usable:
            name = self.worker.id or self.worker.address
            stream = ClientStream(spec, name, self._client_id, self.worker.epoch)
            self._streams[spec.name] = stream
            task = asyncio.create_task(stream.run(self.channel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    async def finish(self) -> None:
        """Close once nothing is live on any stream: what runs may end first."""
        for stream in list(self._streams.values()):
            await stream.quiet()
        await self.aclose()

    async def aclose(self) -> None:
        """End all streams, failing what is live on them, and close. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(None)


class PeerPool:
    """The peers of one process, by address and epoch.

    A worker that restarted on the same address is a new peer. A process that leaves
    the registry may still finish what it has: its peer closes when that is done.
    """

    def __init__(self, client_id: str, config: RpcConfig) -> None:
        self._client_id = client_id
        self._config = config
        self._peers: dict[tuple[str, str], Peer] = {}
        self._leaving: dict[asyncio.Task[None], Peer] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, client_id: str, config: RpcConfig) -> AsyncIterator["PeerPool"]:
        """Yield a pool; close every peer on leaving."""
        pool = cls(client_id, config)
        try:
            yield pool
        finally:
            await pool._aclose()

    def get(self, worker: Worker) -> Peer:
        """Return the peer for this life of this worker."""
        key = (worker.address, worker.epoch)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(worker, self._client_id, self._config)
        return peer

    def retain(self, workers: Iterable[Worker]) -> None:
        """Let every peer that is not among `workers` finish and close, in the background."""
        keep = {(worker.address, worker.epoch) for worker in workers}
        for key in [key for key in self._peers if key not in keep]:
            peer = self._peers.pop(key)
            task = asyncio.create_task(peer.finish())
            self._leaving[task] = peer
            task.add_done_callback(self._leaving.pop)

    async def _aclose(self) -> None:
        peers = [*self._peers.values(), *self._leaving.values()]
        tasks = list(self._leaving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(peer.aclose() for peer in peers), return_exceptions=True)
