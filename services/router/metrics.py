"""What the router tells about itself."""

from collections.abc import Mapping

from kvmesh.errors import MeshError
from kvmesh.telemetry import Meter
from services.router.admission import Admission
from services.router.audit import Audit
from services.router.decisions import DecisionLog
from services.router.planner import Decision
from services.router.reservations import Ledger
from services.router.state import Fleet


class RouterMetrics:
    """The router's instruments. Gauges read the state itself, so they can't drift from it."""

    def __init__(
        self, meter: Meter, fleet: Fleet, ledger: Ledger, admission: Admission, audit: Audit
    ) -> None:
        self._meter = meter
        self._fleet = fleet
        self._decisions = meter.counter(
            "kvmesh_router_decisions",
            "Plans made, by policy, by where the prompt is computed, and why there.",
            labels=("policy", "kind", "reason"),
        )
        self._queue = meter.histogram(
            "kvmesh_router_queue", "Time from a request to its plan.", labels=("model",)
        )
        self._refusals = meter.counter(
            "kvmesh_router_refusals", "Requests that got no plan.", labels=("reason",)
        )
        meter.gauge(
            "kvmesh_router_reservations",
            "Requests that were planned and are not over.",
            lambda: ledger.active,
        )
        meter.gauge(
            "kvmesh_router_waiting", "Requests waiting for a worker.", lambda: admission.waiting
        )
        meter.gauge(
            "kvmesh_router_workers",
            "Workers that are listed, by role and by whether they get requests now.",
            self._workers,
            labels=("role", "routable"),
        )
        meter.gauge(
            "kvmesh_router_reserved_requests",
            "Requests reserved on each worker.",
            lambda: {(w.id,): ledger.held(w.life).requests for w in fleet.workers()},
            labels=("worker",),
        )
        meter.gauge(
            "kvmesh_router_reserved_blocks",
            "Work reserved on each worker, in KV blocks.",
            lambda: {(w.id,): ledger.held(w.life).blocks for w in fleet.workers()},
            labels=("worker",),
        )
        meter.gauge(
            "kvmesh_router_quarantined",
            "1 for workers that are left alone, or tried, after failures; with a partner, for "
            "those that fail to hand KV over between them.",
            self._quarantined,
            labels=("worker", "partner"),
        )
        _show_cache(meter, fleet, audit)

    def decided(self, decision: Decision, model: str, seconds: float) -> None:
        """Count a plan, and the time it took. `model` has workers, as there is a plan."""
        self._queue.record(seconds, model=model)
        plan = decision.plan
        kind = "local" if plan.prefill is None else "remote"
        self._decisions.add(policy=decision.policy, kind=kind, reason=plan.reason)

    def refused(self, error: MeshError) -> None:
        """Count a request that got no plan."""
        self._refusals.add(reason=error.reason.value)

    def show_decisions(self, decisions: DecisionLog) -> None:
        """Show how those who read the decisions keep up."""
        self._meter.gauge(
            "kvmesh_router_decision_followers",
            "Readers that follow the decisions.",
            lambda: decisions.followers,
        )
        self._meter.counter_from(
            "kvmesh_router_decisions_dropped",
            "Decisions that a reader was too slow for.",
            lambda: decisions.dropped,
        )

    def _workers(self) -> Mapping[tuple[str, ...], float]:
        counts: dict[tuple[str, ...], float] = {}
        for worker in self._fleet.workers():
            key = (worker.member.role.value, "yes" if worker.routable else "no")
            counts[key] = counts.get(key, 0) + 1
        return counts

    def _quarantined(self) -> Mapping[tuple[str, ...], float]:
        shown: dict[tuple[str, ...], float] = {(w.id, ""): 0 for w in self._fleet.workers()}
        quarantine = self._fleet.quarantine
        for subject in quarantine.held if quarantine is not None else ():
            names = [life.worker_id for life in subject]
            shown[names[0], "".join(names[1:])] = 1
        return shown


def _show_cache(meter: Meter, fleet: Fleet, audit: Audit) -> None:
    """Show what is thought to be cached where, and how often that turns out to be so."""
    meter.gauge(
        "kvmesh_router_index_blocks",
        "Hashes in the prefix index.",
        lambda: sum(len(index) for index in fleet.indexes()),
    )
    meter.gauge(
        "kvmesh_router_cached_blocks",
        "Blocks that each worker is known to have cached.",
        lambda: {(w.id,): w.cached_blocks() for w in fleet.workers()},
        labels=("worker",),
    )
    meter.gauge(
        "kvmesh_router_flagged",
        "1 for workers whose answers keep disagreeing with what was expected to be cached.",
        lambda: {(w.id,): audit.flagged(w.life) for w in fleet.workers()},
        labels=("worker",),
    )
    for name, description, read in (
        ("prompt", "of answers whose cache hits are known", lambda: audit.prompt_tokens),
        ("expected_cached", "thought to be cached", lambda: audit.expected_tokens),
        ("cached", "found cached", lambda: audit.cached_tokens),
    ):
        meter.counter_from(f"kvmesh_router_{name}_tokens", f"Prompt tokens {description}.", read)
    meter.counter_from(
        "kvmesh_router_disagreements",
        "Answers that found cached what was not expected, or the reverse.",
        lambda: audit.disagreements,
    )
