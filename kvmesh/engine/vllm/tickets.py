"""Makes KV tickets of what vLLM's connector hands out, and checks them on the way in."""

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.clock import Clock
from kvmesh.engine.base import EngineRequest, Seat
from kvmesh.errors import TicketError
from kvmesh.types import KvTicket

ENGINE = "vllm"
BACKEND = "nixl"

# Seconds by which a ticket ends before vLLM's lease: vLLM would let a late pull through
# and read blocks that hold something else by then. Covers clocks that disagree, too.
_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A ticket that may be claimed: from whom, and then what vLLM needs to pull its blocks."""

    claim_address: str
    kv_transfer: dict[str, Any]


class TicketOffice:
    """Issues and admits tickets for one engine.

    `claim_address` is where this engine's own tickets have to be claimed.

    `block_bytes` has the bytes of one block, over all ranks, per KV cache group.
    """

    def __init__(
        self,
        seat: Seat,
        clock: Clock,
        *,
        fingerprint: str,
        block_bytes: Sequence[int],
        lease_seconds: int,
        claim_address: str,
    ) -> None:
        self.fingerprint = fingerprint
        self._claim_address = claim_address
        self._seat = seat
        self._clock = clock
        self._block_bytes = tuple(block_bytes)
        self._lease = lease_seconds - _MARGIN

    def issue(
        self, request: EngineRequest, parameters: Mapping[str, Any], first: Sequence[int]
    ) -> KvTicket:
        """Return the ticket for a prefill that has just ended, with `parameters` of vLLM."""
        groups = parameters["remote_block_ids"]
        sizes = zip(groups, self._block_bytes, strict=True)
        return KvTicket(
            ticket_id=uuid.uuid4().hex,
            worker_id=self._seat.worker_id,
            epoch=self._seat.epoch,
            backend=BACKEND,
            engine=ENGINE,
            layout_fingerprint=self.fingerprint,
            prompt_tokens=len(request.token_ids),
            block_count=sum(len(ids) for ids in groups),
            byte_count=sum(len(ids) * size for ids, size in sizes),
            lease_expire_time=self._clock.wall() + self._lease,
            first_token_ids=tuple(first),
            engine_params=json.dumps(
                {"claim": self._claim_address, "kv_transfer": parameters}
            ).encode(),
        )

    def admit(self, request: EngineRequest, ticket: KvTicket) -> Admitted:
        """Check a ticket against this engine and the request, as far as can be seen here.

        Raises `TicketError` if it can't be honoured, before any block moves.
        """
        if (ticket.engine, ticket.backend) != (ENGINE, BACKEND):
            raise TicketError(
                f"the ticket is from engine {ticket.engine!r} over {ticket.backend!r}, "
                f"not {ENGINE!r} over {BACKEND!r}"
            )
        if ticket.layout_fingerprint != self.fingerprint:
            raise TicketError("the ticket's KV layout differs from this engine's")
        if ticket.prompt_tokens != len(request.token_ids):
            raise TicketError(
                f"the ticket is for {ticket.prompt_tokens} prompt tokens, "
                f"the request has {len(request.token_ids)}"
            )
        if ticket.lease_expire_time <= self._clock.wall():
            raise TicketError("the ticket has expired")
        return _admitted(ticket.engine_params)


def fingerprint(layouts: Sequence[Mapping[str, Any]], block_size: int) -> str:
    """Digest what two engines must share: vLLM's own layout hash of every rank, and sizes."""
    facts = json.dumps([block_size, *layouts], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _admitted(engine_params: bytes) -> Admitted:
    try:
        value = json.loads(engine_params)
        address, kv_transfer = value["claim"], value["kv_transfer"]
    except (ValueError, TypeError, KeyError) as error:
        raise TicketError("the ticket's engine parameters are unreadable") from error
    if not isinstance(address, str) or not isinstance(kv_transfer, dict):
        raise TicketError("the ticket's engine parameters are not of a vLLM prefill")
    return Admitted(address, kv_transfer)
