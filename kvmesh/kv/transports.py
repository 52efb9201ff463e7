"""Where KV transports are made, by name."""

from dataclasses import dataclass

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError
from kvmesh.kv import local
from kvmesh.kv.base import KvTransport, OnPulled, PoolLayout
from kvmesh.kv.shared import SharedPool

BACKENDS = (local.BACKEND,)


@dataclass(frozen=True, slots=True)
class HostPool:
    """A zeroed block pool in host memory and the transport over it.

    `memory` is valid until the transport is closed; views of it must be released before.
    """

    memory: memoryview
    transport: KvTransport


def open_host_pool(
    backend: str, layout: PoolLayout, *, epoch: str, clock: Clock, on_pulled: OnPulled
) -> HostPool:
    """Make a pool and start serving it to peers; call it in a running event loop.

    Raises `InvalidRequestError` for an unknown backend, `TransferError` when it cannot start.
    """
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise InvalidRequestError(f"unknown KV transport {backend!r}: choose one of {known}")
    pool = SharedPool(layout, epoch)
    try:
        transport = local.LocalTransport(pool, clock, on_pulled)
    except BaseException:
        pool.close()
        raise
    return HostPool(pool.memory, transport)
