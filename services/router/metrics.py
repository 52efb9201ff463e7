"""What the router tells about itself."""

from collections.abc import Mapping

from kvmesh.errors import MeshError
from kvmesh.telemetry import Meter
from services.router.admission import Admission
from services.router.planner import Decision
from services.router.reservations import Ledger
from services.router.state import Fleet


class RouterMetrics:
    """The router's instruments. Gauges read the state itself, so they can't drift from it."""

    def __init__(
        self, meter: Meter, policy: str, fleet: Fleet, ledger: Ledger, admission: Admission
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._ledger = ledger
        self._decisions = meter.counter(
            "kvmesh_router_decisions",
            "Plans made, by policy and by where the prompt is computed.",
            labels=("policy", "kind"),
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

    def decided(self, decision: Decision) -> None:
        """Count a plan."""
        kind = "local" if decision.plan.prefill is None else "remote"
        self._decisions.add(policy=self._policy, kind=kind)

    def refused(self, error: MeshError) -> None:
        """Count a request that got no plan."""
        self._refusals.add(reason=error.reason.value)

    def _workers(self) -> Mapping[tuple[str, ...], float]:
        counts: dict[tuple[str, ...], float] = {}
        for worker in self._fleet.workers():
            key = (worker.member.role.value, "yes" if worker.routable else "no")
            counts[key] = counts.get(key, 0) + 1
        return counts
