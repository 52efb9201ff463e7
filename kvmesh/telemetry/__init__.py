"""Traces, metrics and logs of one process, as explicit objects.

`telemetry()` opens them once in a process; what needs them takes `Telemetry`, its
`tracer` or its `meter` as an argument. Nothing global is set but the handler of
`log_to`.
"""

from kvmesh.telemetry.histogram import Histogram, Series
from kvmesh.telemetry.labels import OTHER
from kvmesh.telemetry.logs import log_to
from kvmesh.telemetry.metrics import DURATION_BUCKETS, Counter, Meter
from kvmesh.telemetry.setup import Telemetry, TelemetryConfig, quiet_telemetry, telemetry
from kvmesh.telemetry.trace import Kind, Span, Tracer, current_span, parse_traceparent, safe_message

__all__ = [
    "DURATION_BUCKETS",
    "OTHER",
    "Counter",
    "Histogram",
    "Kind",
    "Meter",
    "Series",
    "Span",
    "Telemetry",
    "TelemetryConfig",
    "Tracer",
    "current_span",
    "log_to",
    "parse_traceparent",
    "quiet_telemetry",
    "safe_message",
    "telemetry",
]
