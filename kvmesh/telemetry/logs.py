"""Log lines: one line a record, with time, level, role and trace.

Prompts and completions are never logged, by nobody.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from kvmesh.telemetry.trace import current_span


@contextmanager
def log_to(
    stream: TextIO, *, role: str, level: str = "info", json_lines: bool = False
) -> Iterator[None]:
    """Write this process's log records to `stream` while inside.

    The root logger gets the level and one more handler; both are undone on leaving.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter(role) if json_lines else _TextFormatter(role))
    root = logging.getLogger()
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


class _TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO router kvmesh.rpc: text trace=...`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        text = _one_line(_message(self, record))
        trace = _trace_id()
        head = f"{_time(record)} {record.levelname} {self._role} {record.name}: {text}"
        return f"{head} trace={trace}" if trace else head


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": _message(self, record),
        }
        if trace := _trace_id():
            line["trace_id"] = trace
        return json.dumps(line, ensure_ascii=False)


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{formatter.formatException(record.exc_info)}"
    return text


def _one_line(text: str) -> str:
    # Also keeps a peer's text from forging a line of its own.
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace_id() -> str:
    span = current_span()
    return span.trace_id if span is not None else ""
