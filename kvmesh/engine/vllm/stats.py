"""vLLM's figures as the mesh's load. Imports no vLLM."""

from collections.abc import Callable, Mapping
from typing import Any

from kvmesh.engine.vllm.settings import ENDED_KEY


class Gauge:
    """The latest of what vLLM's scheduler tells of itself.

    It tells after each step, so an idle engine is silent: what depends on running
    requests has to be read together with whether there are any.
    """

    def __init__(self, on_ended: Callable[[str], None]) -> None:
        self._on_ended = on_ended
        self.waiting = 0
        self.kv_usage = 0.0
        self.received_bytes = 0
        self.received_seconds = 0.0
        self.expired_leases = 0
        self.preemptions = 0

    def update(self, scheduler: Any) -> None:
        """Take in one `SchedulerStats`."""
        self.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
        self.kv_usage = scheduler.kv_cache_usage
        transfers: Mapping[str, list[Any]] = scheduler.kv_connector_stats or {}
        self.received_bytes += int(sum(transfers.get("bytes_transferred", ())))
        self.received_seconds += float(sum(transfers.get("transfer_duration", ())))
        self.expired_leases += len(transfers.get("num_kv_expired_reqs", ()))
        for request_id in transfers.get(ENDED_KEY, ()):
            self._on_ended(request_id)


def logger_factory(gauge: Gauge) -> Callable[[Any, int], Any]:
    """Return what vLLM calls to make a stat logger that feeds `gauge`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class GaugeLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.engine_index = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any = None, *_: Any, **__: Any
        ) -> None:
            if scheduler_stats is not None:
                gauge.update(scheduler_stats)
            if iteration_stats is not None:
                gauge.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            """Nothing to say: the engine's owner tells that it is ready."""

    return GaugeLogger
