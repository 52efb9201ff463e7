"""Every span that was started, and whether it ended: for tests of endings."""

import threading

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor


class SpanLedger(SpanProcessor):
    """Keeps spans as they start and as they end, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, str] = {}
        self.ended: list[ReadableSpan] = []

    @property
    def open(self) -> list[str]:
        """The names of the spans that have started and not ended."""
        with self._lock:
            return sorted(self._open.values())

    @property
    def names(self) -> list[str]:
        """The names of the spans that have ended, each as often as it did."""
        return sorted(span.name for span in self.ended)

    def named(self, name: str) -> ReadableSpan:
        """Return the one span of this name that has ended."""
        found = [span for span in self.ended if span.name == name]
        assert len(found) == 1, (name, self.names)
        return found[0]

    def text(self) -> str:
        """Return everything that the ended spans say."""
        return "".join(str(span.to_json()) for span in self.ended)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Note a start."""
        with self._lock:
            self._open[_id(span)] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        """Note an end: of a span that has started and not ended before."""
        with self._lock:
            del self._open[_id(span)]
            self.ended.append(span)


def _id(span: ReadableSpan) -> int:
    context = span.context
    assert context is not None
    return int(context.span_id)
