"""Spans whose context travels inside our messages.

Streams carry many requests, so gRPC's metadata can't carry a request's trace: each
start has a W3C `traceparent` string instead. A span's parent is always given, as
such a string or with `Span.child`, never taken from the task that runs.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Tracer as OtelTracer

from kvmesh.errors import InvalidRequestError, MeshError, Reason

Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Kind = SpanKind

# Version 00 is 55 characters long; later versions may go on after a dash.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACEPARENT_LENGTH = 55
_LONGEST_TRACEPARENT = 512

_current: ContextVar["Span | None"] = ContextVar("kvmesh_span", default=None)


def current_span() -> "Span | None":
    """Return the innermost span entered in this task, for log lines."""
    return _current.get()


def safe_message(error: BaseException) -> str:
    """Return what of an error's message may be recorded, "" for nothing.

    Only what our own errors say of the mesh: others may quote a prompt, and what is
    wrong with a request is told to its caller in his own words.
    """
    if isinstance(error, MeshError) and not isinstance(error, InvalidRequestError):
        return error.message
    return ""


def parse_traceparent(text: str) -> str:
    """Return the 55 characters of a valid W3C traceparent, or "" for anything else."""
    if len(text) != _TRACEPARENT_LENGTH and (
        not _TRACEPARENT_LENGTH < len(text) <= _LONGEST_TRACEPARENT
        or text.startswith("00")
        or text[_TRACEPARENT_LENGTH] != "-"
    ):
        return ""
    found = _TRACEPARENT.match(text)
    return found.group() if found else ""


class Tracer:
    """Starts spans. Without an exporter spans record nothing and pass their parent on."""

    __slots__ = ("_inner",)

    def __init__(self, inner: OtelTracer | None = None) -> None:
        self._inner = inner

    def span(
        self,
        name: str,
        traceparent: str = "",
        attributes: Mapping[str, Attribute] | None = None,
        *,
        kind: Kind = Kind.INTERNAL,
    ) -> "Span":
        """Start a span under `traceparent`; "" or a malformed one begins a new trace.

        A parent that isn't sampled (flags 00) makes a span that isn't. Use the span as
        a context manager, or call `end`.
        """
        parent = parse_traceparent(traceparent) if traceparent else ""
        if self._inner is None:
            return Span(parent)
        context = Context()
        if parent:
            context = set_span_in_context(NonRecordingSpan(_remote(parent)), context)
        return self._start(name, context, attributes, kind)

    def _start(
        self, name: str, context: Context, attributes: Mapping[str, Attribute] | None, kind: Kind
    ) -> "Span":
        assert self._inner is not None
        span = self._inner.start_span(name, context, kind, attributes)
        ids = span.get_span_context()
        text = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
        return Span(text, span, self)


class Span:
    """A piece of work in a trace.

    `traceparent` goes into messages that start work under this span; it is "" where
    there is no trace. A span ends exactly once: when its block is left or at the first
    `end`. What happens to it later is ignored.
    """

    __slots__ = ("_inner", "_outer", "_tracer", "traceparent")

    def __init__(
        self, traceparent: str, inner: OtelSpan | None = None, tracer: Tracer | None = None
    ) -> None:
        self.traceparent = traceparent
        self._inner = inner
        self._tracer = tracer
        self._outer: Span | None = None

    @property
    def trace_id(self) -> str:
        """The trace as 32 hex digits, or ""."""
        return self.traceparent[3:35]

    @property
    def recording(self) -> bool:
        """Whether anybody will see what is set."""
        return self._inner is not None and self._inner.is_recording()

    def child(
        self,
        name: str,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        kind: Kind = Kind.INTERNAL,
    ) -> "Span":
        """Start a span under this one, in this process. Works after `end`, too."""
        if self._tracer is None:
            return Span(self.traceparent)
        ids = _remote(self.traceparent)
        local = SpanContext(ids.trace_id, ids.span_id, is_remote=False, trace_flags=ids.trace_flags)
        context = set_span_in_context(NonRecordingSpan(local), Context())
        return self._tracer._start(name, context, attributes, kind)

    def set(self, key: str, value: Attribute) -> None:
        """Set an attribute."""
        if self._inner is not None:
            self._inner.set_attribute(key, value)

    def event(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> None:
        """Note that something happened now, such as the first token."""
        if self._inner is not None:
            self._inner.add_event(name, attributes)

    def fail(self, kind: str) -> None:
        """Mark the span as failed; it goes on. `kind` is one of few, such as a status."""
        if self._inner is not None:
            self._inner.set_attribute("error.type", kind)
            self._inner.set_status(StatusCode.ERROR)

    def end(self, error: BaseException | None = None) -> None:
        """End the span; with `error`, as failed for its reason and with its `safe_message`."""
        inner, self._inner = self._inner, None
        if inner is None:
            return
        if error is not None:
            inner.set_attribute("error.type", _reason(error))
            inner.set_status(StatusCode.ERROR, safe_message(error) or None)
        inner.end()

    def __enter__(self) -> Self:
        self._outer = _current.get()
        _current.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Not a token's reset: an async generator may be closed by another task.
        if _current.get() is self:
            _current.set(self._outer)
        self.end(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, MeshError):
        return error.reason.value
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return Reason.CANCELLED.value
    return type(error).__name__


def _remote(traceparent: str) -> SpanContext:
    return SpanContext(
        trace_id=int(traceparent[3:35], 16),
        span_id=int(traceparent[36:52], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(traceparent[53:55], 16)),
    )
