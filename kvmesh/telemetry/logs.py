"""Log lines: one line a record, with time, level, role and trace.

Prompts and completions are never logged, by nobody. An exception that nobody expected
may quote one: it is logged as its type and where it came from, without its message.
"""

import json
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

from kvmesh.telemetry.trace import current_span, safe_message

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


@contextmanager
def log_to(
    stream: TextIO,
    *,
    role: str,
    level: str = "info",
    json_lines: bool = False,
    messages: bool = False,
) -> Iterator[None]:
    """Write this process's log records to `stream` while inside.

    With `messages` also what unexpected exceptions say, which may quote a prompt.
    The root logger gets the level and one more handler; both are undone on leaving.
    """
    handler = logging.StreamHandler(stream)
    formatter = _JsonFormatter if json_lines else _TextFormatter
    handler.setFormatter(formatter(role, messages=messages))
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


class _Formatter(logging.Formatter):
    def __init__(self, role: str, *, messages: bool) -> None:
        super().__init__()
        self._role = role
        self._messages = messages

    def text(self, record: logging.LogRecord) -> str:
        """Return the message, and below it what was raised, if anything was."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's name
        """Return the traceback; without messages, unless they are asked for."""
        if self._messages or ei[1] is None:
            return super().formatException(ei)
        return "\n".join(_traceback(ei[1], set()))


class _TextFormatter(_Formatter):
    """`2026-01-31T12:00:00.000Z INFO router kvmesh.rpc: text trace=...`."""

    def format(self, record: logging.LogRecord) -> str:
        text = _one_line(self.text(record))
        trace = _trace_id()
        head = f"{_time(record)} {record.levelname} {self._role} {record.name}: {text}"
        return f"{head} trace={trace}" if trace else head


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": self.text(record),
        }
        if trace := _trace_id():
            line["trace_id"] = trace
        return json.dumps(line, ensure_ascii=False)


def _traceback(error: BaseException, seen: set[int]) -> list[str]:
    """Return an exception's frames and type, after those of what it came from."""
    seen.add(id(error))
    lines: list[str] = []
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        lines += [*_traceback(before, seen), "which led to"]
    lines += [line.rstrip() for line in traceback.format_tb(error.__traceback__)]
    message = safe_message(error)
    lines.append(f"{type(error).__qualname__}: {message}" if message else type(error).__qualname__)
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            if id(part) not in seen:
                lines += ["of which one is", *_traceback(part, seen)]
    return lines


def _one_line(text: str) -> str:
    # Also keeps a peer's text from forging a line of its own.
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace_id() -> str:
    span = current_span()
    return span.trace_id if span is not None else ""
