"""`PrefillService` over an engine."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio

from kvmesh.engine.base import (
    Announce,
    ConcurrentPrefillEngine,
    EngineRequest,
    Prefilled,
    PrefillEngine,
)
from kvmesh.host.desk import EngineDesk
from kvmesh.rpc.serving import ServerCall
from kvmesh.rpc.specs import PREFILL
from kvmesh.types import Completion, KvTicket, Usage
from kvmesh.v1 import prefill_pb2, prefill_pb2_grpc
from kvmesh.wire import ticket_to_proto
from kvmesh.wire_logprobs import logprobs_to_proto

SERVICE_NAME = "kvmesh.v1.PrefillService"


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs each start as one prefill of the engine."""

    def __init__(self, desk: EngineDesk, engine: PrefillEngine) -> None:
        self._desk = desk
        self._engine = engine

    def register(self, server: grpc.aio.Server) -> None:
        """Add this to a server."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Any
    ) -> None:
        """Serve one client's stream."""
        await self._desk.serve(PREFILL, self._start, request_iterator, context)

    def _start(self, start: prefill_pb2.PrefillStart, call: ServerCall) -> None:
        request = self._desk.request(start, call)
        call.spawn(self._prefill(request, call))

    async def _prefill(self, request: EngineRequest, call: ServerCall) -> Completion:
        engine = self._engine
        if self._desk.info.concurrent_handoff and isinstance(engine, ConcurrentPrefillEngine):
            prefilled = await self._run(request, engine.prefill_announced(request, _early(call)))
            return _completion(request, prefilled)
        prefilled = await self._run(request, engine.prefill(request))
        # No await from here on: a ticket in hand is a ticket on its way.
        result = call.outbox.next().results.add(
            stream_id=call.stream_id, cached_tokens=prefilled.cached_tokens
        )
        if prefilled.finish is not None or self._desk.info.continues_first_token:
            result.first_token_ids.extend(prefilled.first_token_ids)
            logprobs_to_proto(prefilled.logprobs or (), result)
        if prefilled.ticket is not None:
            ticket_to_proto(prefilled.ticket, result.ticket)
        return _completion(request, prefilled)

    async def _run(self, request: EngineRequest, prefill: Awaitable[Prefilled]) -> Prefilled:
        with self._desk.work("engine.prefill", request) as work:
            prefilled = await prefill
            work.span.set("kvmesh.cached_tokens", prefilled.cached_tokens)
            self._desk.metrics.prompt(len(request.token_ids), prefilled.cached_tokens)
            self._desk.metrics.completion_tokens += len(prefilled.first_token_ids)
            work.end(None if prefilled.finish is None else prefilled.finish.reason)
            return prefilled


def _early(call: ServerCall) -> Announce:
    """Return what sends a ticket before its prompt is computed."""

    def announce(ticket: KvTicket, cached_tokens: int) -> None:
        result = call.outbox.next().results.add(
            stream_id=call.stream_id, cached_tokens=cached_tokens, computing=True
        )
        ticket_to_proto(ticket, result.ticket)

    return announce


def _completion(request: EngineRequest, prefilled: Prefilled) -> Completion:
    usage = Usage(
        prompt_tokens=len(request.token_ids),
        completion_tokens=len(prefilled.first_token_ids),
        cached_tokens=prefilled.cached_tokens,
    )
    if prefilled.finish is None:
        return Completion(usage=usage)
    return Completion(prefilled.finish.reason, usage, prefilled.finish.stop_token_id)
