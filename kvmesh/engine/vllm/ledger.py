"""The KV tickets an engine has given out and whose blocks it still holds."""

import asyncio
from dataclasses import dataclass, field

from kvmesh.types import KvTicket


@dataclass(slots=True)
class _Held:
    ticket: KvTicket
    request_id: str
    claimed: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class TicketLedger:
    """Held tickets, by their id and by vLLM's id of the request that made them.

    vLLM is the one to say that a lease has ended (pulled, released or expired); the
    ledger never ends one by a timer of its own, since a waiting decode worker's
    heartbeats extend it. One event loop only.
    """

    def __init__(self) -> None:
        self._by_ticket: dict[str, _Held] = {}
        self._by_request: dict[str, _Held] = {}
        self.blocks = 0
        self.bytes = 0

    def hold(self, ticket: KvTicket, request_id: str) -> None:
        """Count a ticket whose blocks vLLM holds under `request_id`."""
        held = _Held(ticket, request_id)
        self._by_ticket[ticket.ticket_id] = self._by_request[request_id] = held
        self.blocks += ticket.block_count
        self.bytes += ticket.byte_count

    def claim(self, epoch: str, ticket_id: str) -> bool:
        """Mark a ticket as about to be pulled; False if it isn't held, or was claimed."""
        held = self._by_ticket.get(ticket_id)
        if held is None or held.claimed or held.ticket.epoch != epoch:
            return False
        held.claimed = True
        return True

    def request_of(self, ticket_id: str) -> str | None:
        """Return vLLM's request id of a held ticket, None if it isn't held."""
        held = self._by_ticket.get(ticket_id)
        return held.request_id if held else None

    def end(self, request_id: str) -> None:
        """Forget the ticket of a request whose blocks are free, if there is one."""
        held = self._by_request.pop(request_id, None)
        if held is None:
            return
        del self._by_ticket[held.ticket.ticket_id]
        self.blocks -= held.ticket.block_count
        self.bytes -= held.ticket.byte_count
        held.ended.set()

    def clear(self) -> None:
        """Forget all: the engine is gone."""
        for request_id in tuple(self._by_request):
            self.end(request_id)

    async def wait_ended(self, ticket_id: str) -> None:
        """Return once the ticket is held no more."""
        held = self._by_ticket.get(ticket_id)
        if held is not None:
            await held.ended.wait()
