"""KV tickets that no decode takes are given back, whoever has left meanwhile."""

import asyncio
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvmesh.errors import MeshError
from kvmesh.rpc.clients import PrefillCall
from kvmesh.rpc.workers import release_kv
from kvmesh.types import KvTicket, Worker
from services.frontend.fleet import Fleet
from services.frontend.metrics import FrontendMetrics

log = logging.getLogger(__name__)

RELEASE_SECONDS = 5.0
"""Time for one release; what can't be told in time ends with the ticket's lease."""


@dataclass(frozen=True, slots=True)
class Handover:
    """Where decode finds a prompt's KV. `computing`: the call that is not done with it yet."""

    holder: Worker
    ticket: KvTicket
    computing: PrefillCall | None


class Tickets:
    """Owns the releases. An async context manager: leaving waits for those that run."""

    def __init__(self, fleet: Fleet, metrics: FrontendMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        await asyncio.gather(*self._tasks)

    def give_back(self, handover: Handover) -> None:
        """Release what no decode takes."""
        self.release(handover.holder, handover.ticket)

    def release(self, holder: Worker, ticket: KvTicket) -> None:
        """End a ticket's lease, in the background: the caller may go away at once."""
        self._metrics.orphans += 1
        if self._closed:
            return  # the process ends: the lease will
        task = asyncio.create_task(self._release(holder, ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, holder: Worker, ticket: KvTicket) -> None:
        try:
            await release_kv(self._fleet.peer(holder), ticket, RELEASE_SECONDS)
        except MeshError as error:
            log.warning("KV ticket of %s not released, its lease will: %s", holder.id, error)
        except Exception:  # top of a background task
            log.exception("releasing a KV ticket of %s failed", holder.id)
