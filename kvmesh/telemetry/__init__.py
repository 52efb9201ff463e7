"""Traces, metrics and logs of one process, as explicit objects.

`telemetry()` opens them once in a process; what needs them takes `Telemetry`, its
`tracer` or its `meter` as an argument. Nothing global is set but the handler of
`log_to`.
"""

from kvmesh.telemetry.logs import log_to
from kvmesh.telemetry.metrics import DURATION_BUCKETS, Counter, Histogram, Meter
from kvmesh.telemetry.setup import Telemetry, TelemetryConfig, quiet_telemetry, telemetry
from kvmesh.telemetry.trace import Kind, Span, Tracer, current_span, parse_traceparent

__all__ = [
    "DURATION_BUCKETS",
    "Counter",
    "Histogram",
    "Kind",
    "Meter",
    "Span",
    "Telemetry",
    "TelemetryConfig",
    "Tracer",
    "current_span",
    "log_to",
    "parse_traceparent",
    "quiet_telemetry",
    "telemetry",
]
