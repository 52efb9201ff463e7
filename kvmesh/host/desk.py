"""A started engine as the servicers of prefill and decode use it."""

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from kvmesh.engine.base import AsyncEngine, EngineInfo, EngineRequest
from kvmesh.host.engine_metrics import EngineMetrics, EngineWork
from kvmesh.host.process import Process
from kvmesh.rpc.serving import ServerCall, ServerStream
from kvmesh.rpc.specs import StreamSpec
from kvmesh.wire import sampling_from_proto, token_ids


@dataclass(frozen=True, slots=True)
class Running:
    """A started engine, and what it says of itself."""

    engine: AsyncEngine
    info: EngineInfo


class EngineDesk:
    """An engine as a role's servicer uses it: serves streams whose starts it can run."""

    def __init__(self, running: Running, process: Process) -> None:
        self.engine = running.engine
        self.info = running.info
        telemetry, info = process.telemetry, running.info
        self.metrics = EngineMetrics(telemetry.meter, running.engine, info.model, process.role)
        self._tracer = telemetry.tracer
        self._process = process
        self._numbers = itertools.count()

    async def serve(
        self,
        spec: StreamSpec[Any, Any],
        start: Callable[[Any, ServerCall], None],
        requests: AsyncIterator[Any],
        context: Any,
    ) -> None:
        """Serve one client's stream, as `ServerStream` does."""
        process = self._process
        stream = ServerStream(
            spec, start, identity=process.identity, gate=process.gate, clock=process.clock
        )
        await stream.run(requests, context)

    def work(self, name: str, request: EngineRequest) -> EngineWork:
        """Begin to follow a request in the engine, under a span of this name."""
        attributes = {"kvmesh.prompt_tokens": len(request.token_ids)}
        return self.metrics.work(self._tracer.span(name, request.traceparent, attributes))

    def request(self, start: Any, call: ServerCall) -> EngineRequest:
        """Read what a start asks of the engine. Raises `InvalidRequestError`."""
        return EngineRequest(
            # Callers may repeat their ids; the engine's are its own.
            request_id=f"{next(self._numbers):x}-{call.context.request_id}",
            token_ids=token_ids(start.token_ids),
            sampling=sampling_from_proto(start.sampling),
            priority=call.context.priority,
            traceparent=call.context.traceparent,
            generated=tuple(getattr(start, "generated_token_ids", ())),
        )
