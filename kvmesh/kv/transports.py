"""Where KV transports are made, by name."""

from dataclasses import dataclass

import numpy as np

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError
from kvmesh.kv import local
from kvmesh.kv.base import KvTransport, OnPulled, PoolLayout
from kvmesh.kv.shared import SharedPool

BACKENDS = (local.BACKEND, "nixl")


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
        if backend == local.BACKEND:
            transport: KvTransport = local.LocalTransport(pool, clock, on_pulled)
        else:
            transport = _nixl(pool, clock, on_pulled)
    except BaseException:
        pool.close()
        raise
    return HostPool(pool.memory, transport)


def _nixl(pool: SharedPool, clock: Clock, on_pulled: OnPulled) -> KvTransport:
    from kvmesh.kv.nixl import NixlTransport
    from kvmesh.kv.nixl_messages import Region

    address = np.frombuffer(pool.memory, np.uint8).ctypes.data
    return NixlTransport(Region(pool.layout, address), pool.epoch, clock, on_pulled, pool.close)
