"""A gRPC proxy in front of a worker that can lose what the worker tells of itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from kvmesh.rpc.config import RpcConfig

EVENTS = "/kvmesh.v1.WorkerService/WatchEvents"


class EventGap:
    """Passes every call on, byte by byte; loses messages of event streams when told to."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.to_lose = 0
        """Messages of event streams to lose from now on."""
        self.lost = 0
        """Messages that were lost."""
        self.watched = 0
        """Event streams that were opened."""
        self._channel = channel

    def service(self, details: Any) -> Any:
        """Return what serves the method that is called, whichever it is."""

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            call = self._channel.stream_stream(details.method, None, None)(requests)
            watching = details.method == EVENTS
            self.watched += watching
            try:
                async for message in call:
                    if watching and self.to_lose:
                        self.to_lose -= 1
                        self.lost += 1
                    else:
                        yield message
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), error.trailing_metadata())
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)


@asynccontextmanager
async def event_gap(listen: str, worker: str) -> AsyncIterator[EventGap]:
    """Yield a proxy that listens at one address and calls another, both `host:port`."""
    config = RpcConfig()
    async with grpc.aio.insecure_channel(worker, options=config.channel_options()) as channel:
        gap = EventGap(channel)
        server = grpc.aio.server(options=config.server_options())
        everything: Any = (gap,)  # it has the one method of a generic handler
        server.add_generic_rpc_handlers(everything)
        server.add_insecure_port(listen)
        await server.start()
        try:
            yield gap
        finally:
            await server.stop(0)
