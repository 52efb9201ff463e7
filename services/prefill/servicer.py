"""`PrefillService` over an engine."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from kvmesh.clock import Clock
from kvmesh.engine.base import EngineInfo, EngineRequest, Prefilled, PrefillEngine
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.serving import Identity, ServerCall, ServerStream
from kvmesh.rpc.specs import PREFILL
from kvmesh.telemetry import Tracer
from kvmesh.types import Completion, Usage
from kvmesh.v1 import prefill_pb2, prefill_pb2_grpc
from kvmesh.wire import sampling_from_proto, ticket_to_proto, token_ids

SERVICE_NAME = "kvmesh.v1.PrefillService"


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs each start as one prefill of the engine."""

    def __init__(
        self,
        engine: PrefillEngine,
        info: EngineInfo,
        *,
        identity: Identity,
        gate: Gate,
        clock: Clock,
        tracer: Tracer,
    ) -> None:
        self._engine = engine
        self._info = info
        self._identity = identity
        self._gate = gate
        self._clock = clock
        self._tracer = tracer
        self._numbers = itertools.count()

    def register(self, server: grpc.aio.Server) -> None:
        """Add this to a server."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Any
    ) -> None:
        """Serve one client's stream."""
        stream = ServerStream(
            PREFILL, self._start, identity=self._identity, gate=self._gate, clock=self._clock
        )
        await stream.run(request_iterator, context)

    def _start(self, start: prefill_pb2.PrefillStart, call: ServerCall) -> None:
        request = EngineRequest(
            # Callers may repeat their ids; the engine's are its own.
            request_id=f"{next(self._numbers):x}-{call.context.request_id}",
            token_ids=token_ids(start.token_ids),
            sampling=sampling_from_proto(start.sampling),
            priority=call.context.priority,
            traceparent=call.context.traceparent,
        )
        call.spawn(self._prefill(request, call))

    async def _prefill(self, request: EngineRequest, call: ServerCall) -> Completion:
        with self._tracer.span("engine.prefill", request.traceparent) as span:
            span.set("kvmesh.prompt_tokens", len(request.token_ids))
            prefilled = await self._engine.prefill(request)
            span.set("kvmesh.cached_tokens", prefilled.cached_tokens)
        # No await from here on: a ticket in hand is a ticket on its way.
        result = call.outbox.next().results.add(
            stream_id=call.stream_id, cached_tokens=prefilled.cached_tokens
        )
        if prefilled.finish is not None or self._info.continues_first_token:
            result.first_token_ids.extend(prefilled.first_token_ids)
        if prefilled.ticket is not None:
            ticket_to_proto(prefilled.ticket, result.ticket)
        return _completion(request, prefilled)


def _completion(request: EngineRequest, prefilled: Prefilled) -> Completion:
    usage = Usage(
        prompt_tokens=len(request.token_ids),
        completion_tokens=len(prefilled.first_token_ids),
        cached_tokens=prefilled.cached_tokens,
    )
    if prefilled.finish is None:
        return Completion(usage=usage)
    return Completion(prefilled.finish.reason, usage, prefilled.finish.stop_token_id)
