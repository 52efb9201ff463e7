"""Typed client of `WorkerService`, which prefill and decode workers share.

Each function takes the `Peer` to ask. All errors are `MeshError`s.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc.aio

from kvmesh.rpc.peer import Peer
from kvmesh.rpc.status import from_rpc_error
from kvmesh.types import KvTicket, WorkerNews
from kvmesh.v1 import worker_pb2, worker_pb2_grpc
from kvmesh.wire import SCHEMA_REVISION, event_from_proto


async def release_kv(peer: Peer, ticket: KvTicket, timeout: float = 5.0) -> bool:
    """End a ticket's lease. False if nothing was held for it."""
    stub: Any = _worker_stub(peer.channel)
    request = worker_pb2.ReleaseKvRequest(ticket_id=ticket.ticket_id, epoch=ticket.epoch)
    try:
        response = await stub.ReleaseKv(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return bool(response.released)


async def watch_worker(peer: Peer, client_id: str) -> AsyncGenerator[WorkerNews, None]:
    """Yield a worker's events, a snapshot first. Raises `MeshError` when it breaks."""
    stub: Any = _worker_stub(peer.channel)
    request = worker_pb2.WatchEventsRequest(schema_revision=SCHEMA_REVISION, client_id=client_id)
    rpc = stub.WatchEvents(request)
    try:
        async for message in rpc:
            events = [e for e in map(event_from_proto, message.events) if e is not None]
            yield WorkerNews(message.worker_id, message.epoch, message.sequence, events)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        rpc.cancel()


_worker_stub: Callable[[grpc.aio.Channel], Any] = worker_pb2_grpc.WorkerServiceStub
