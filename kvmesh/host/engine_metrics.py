"""What a worker's process tells of its engine, and of each request in it."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from kvmesh.engine.base import AsyncEngine
from kvmesh.errors import MeshError, Reason
from kvmesh.telemetry import Meter, Span
from kvmesh.types import FinishReason, Load, Role

PREFILLED = "prefilled"
"""The finish reason of a prompt whose KV waits at a ticket."""

ABORT = "abort"
ERROR = "error"
"""Finish reasons of what did not end by itself, as vLLM calls them: workers' and frontends'."""


@runtime_checkable
class Preempting(Protocol):
    """An engine that takes blocks from one request for another, and counts it."""

    @property
    def preemptions(self) -> int:
        """How often it did."""
        ...


class EngineMetrics:
    """The instruments of one engine. Gauges read the engine itself: they can't drift from it.

    `completion_tokens` is counted up for each step, by whoever hands the tokens on.
    """

    def __init__(self, meter: Meter, engine: AsyncEngine, model: str, role: Role) -> None:
        self.completion_tokens = 0
        self._queries = 0
        self._hits = 0
        self._meter = meter
        self._labels = (model, role.value)
        self._finished = meter.counter(
            "kvmesh_engine_finished",
            "Requests that the engine is done with, by why.",
            labels=("model", "role", "finish_reason"),
        )
        for name, (unit, description) in _GAUGES.items():
            self._show(meter.gauge, name, description, _of_load(engine, name), unit)
        self._show(meter.gauge, "kv_usage", "Share of the KV blocks in use.", _usage(engine), "")
        for name, description in _TOTALS.items():
            read = partial(getattr, self, f"_{name.rpartition('_')[2]}")
            self._show(meter.counter_from, name, description, read, "")
        self._show(
            meter.counter_from,
            "completion_tokens",
            "Tokens generated.",
            lambda: self.completion_tokens,
            "",
        )
        if isinstance(engine, Preempting):
            counted = _Preemptions(engine)
            description = "Requests whose KV was given up for others; they recompute."
            self._show(meter.counter_from, "preemptions", description, counted.read, "")
        meter.counter_from(
            "kvmesh_kv_received",
            "Bytes of KV pulled from other workers.",
            lambda: {self._labels: float(engine.load().received_bytes)},
            labels=("model", "role"),
            unit="By",
        )

    def work(self, span: Span) -> "EngineWork":
        """Return what follows one request to its end."""
        return EngineWork(self, span)

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt that was computed here, and what of it was cached."""
        self._queries += tokens
        self._hits += cached

    def finished(self, reason: str) -> None:
        """Count a request that has ended."""
        model, role = self._labels
        self._finished.add(model=model, role=role, finish_reason=reason)

    def _show(
        self,
        instrument: "_Instrument",
        name: str,
        description: str,
        read: Callable[[], float],
        unit: str,
    ) -> None:
        instrument(
            f"kvmesh_engine_{name}",
            description,
            lambda: {self._labels: float(read())},
            labels=("model", "role"),
            unit=unit,
        )


class EngineWork:
    """One request in an engine: its span and its count.

    Both end once, at the first `end` or `fail`. As a context manager it fails with what
    leaves the block.
    """

    __slots__ = ("_ended", "_metrics", "span")

    def __init__(self, metrics: EngineMetrics, span: Span) -> None:
        self.span = span
        self._metrics = metrics
        self._ended = False

    def end(self, finish: FinishReason | None) -> None:
        """End naturally; `finish` None: the prompt's KV waits at a ticket."""
        self._end(PREFILLED if finish is None else finish.value, None)

    def fail(self, error: BaseException) -> None:
        """End with what failed, or with what it was cancelled by."""
        if isinstance(error, MeshError):
            aborted = error.reason is Reason.CANCELLED
        else:
            aborted = not isinstance(error, Exception)
        self._end(ABORT if aborted else ERROR, error)

    def __enter__(self) -> Self:
        self.span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.span.__exit__(kind, error, traceback)

    def _end(self, reason: str, error: BaseException | None) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.finished(reason)
            self.span.end(error)


class _Instrument(Protocol):
    def __call__(
        self,
        name: str,
        description: str,
        read: Callable[[], dict[tuple[str, ...], float]],
        *,
        labels: tuple[str, ...],
        unit: str,
    ) -> None: ...


class _Preemptions:
    """The engine's count, also after it was closed."""

    def __init__(self, engine: Preempting) -> None:
        self._engine = engine
        self._last = 0

    def read(self) -> float:
        with suppress(MeshError):
            self._last = self._engine.preemptions
        return self._last


_GAUGES = {
    "running": ("", "Requests in the running batch."),
    "waiting": ("", "Requests waiting for room."),
    "used_blocks": ("", "KV blocks in use by requests and tickets."),
    "total_blocks": ("", "KV blocks in all."),
    "ticket_blocks": ("", "KV blocks held for tickets."),
    "ticket_bytes": ("", "Bytes held for tickets."),
}

_TOTALS = {
    "prefix_cache_queries": "Tokens of the prompts that were computed here.",
    "prefix_cache_hits": "Those of them that were found cached.",
}


def _of_load(engine: AsyncEngine, name: str) -> Callable[[], float]:
    return lambda: float(getattr(engine.load(), name))


def _usage(engine: AsyncEngine) -> Callable[[], float]:
    def read() -> float:
        load: Load = engine.load()
        return load.used_blocks / load.total_blocks if load.total_blocks else 0.0

    return read
