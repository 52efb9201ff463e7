"""One decision: filter, score, pick, reserve. Pure but for the ledger it writes to."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvmesh.types import Plan, Role
from services.router.policy import Candidate, Demand, Policy
from services.router.reservations import Ledger, Reservation
from services.router.state import Fleet, WorkerState

DEFAULT_MAX_REQUESTS = 512
"""Requests on a worker that neither we nor it set a limit for."""

FALLBACK_BLOCK_SIZE = 16
"""Tokens per block where nobody says: loads stay comparable within a fleet."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """What decisions depend on.

    Of a completion only what is expected is reserved: most end long before the most
    they are allowed.
    """

    policy: str = field(
        default="least_loaded",
        metadata={"help": "how workers are picked: round_robin, least_loaded or a plug-in"},
    )
    remote_prefill_min_tokens: int = field(
        default=32,
        metadata={"help": "uncached prompt tokens that make a remote prefill worth it", "min": 0},
    )
    max_requests_per_worker: int = field(
        default=0, metadata={"help": "requests on one worker; 0: its own limit", "min": 0}
    )
    expected_completion_tokens: int = field(
        default=256, metadata={"help": "completion tokens to reserve for at most", "min": 0}
    )


class Blocked(Enum):
    """Why there is no plan now."""

    NO_WORKER = "no worker"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, the reservation taken for it, and what it was chosen from."""

    plan: Plan
    reservation: Reservation
    decode_candidates: Sequence[Candidate]
    prefill_candidates: Sequence[Candidate]


class Planner:
    """Turns demands into plans."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        config: RoutingConfig,
        policy: Callable[[], Policy],
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._config = config
        self._new_policy = policy
        self._rng = rng
        self._policies: dict[tuple[str, Role], Policy] = {}

    def plan(self, demand: Demand) -> Decision | Blocked:
        """Choose workers and reserve room on them, or say why that can't be done now.

        The reservation weighs on the very next decision: a burst spreads.
        """
        ready = self._ready(demand, Role.DECODE)
        if not ready:
            return Blocked.NO_WORKER
        candidates = self._candidates(ready)
        if not candidates:
            return Blocked.FULL
        decode = self._policy(demand.model, Role.DECODE).pick(candidates, demand, self._rng)
        cached = decode.cached_tokens(demand)
        uncached = demand.prompt_tokens - cached
        prefill_candidates = self._prefill_candidates(demand, decode.worker, uncached)
        prefill = None
        if prefill_candidates:
            pick = self._policy(demand.model, Role.PREFILL).pick
            prefill = pick(prefill_candidates, demand, self._rng)
            cached = prefill.cached_tokens(demand)
        plan = Plan(
            decode=decode.worker.reference(),
            prefill=None if prefill is None else prefill.worker.reference(),
            expected_cached_tokens=cached,
            why=self._explain(decode, prefill, uncached),
        )
        reservation = self._reserve(demand, decode, prefill, demand.prompt_tokens - cached)
        return Decision(plan, reservation, candidates, prefill_candidates)

    def has_worker(self, demand: Demand) -> bool:
        """Return whether any decode worker could take the demand, with or without room."""
        return bool(self._ready(demand, Role.DECODE))

    def _ready(self, demand: Demand, role: Role) -> Sequence[WorkerState]:
        ready = self._fleet.routable(demand.model, role)
        if demand.excluded:
            return [w for w in ready if w.id not in demand.excluded]
        return ready

    def _candidates(self, workers: Sequence[WorkerState]) -> list[Candidate]:
        candidates = []
        limit = self._config.max_requests_per_worker
        for worker in workers:
            held = self._ledger.held(worker.life)
            room = limit or worker.capacity or DEFAULT_MAX_REQUESTS
            if held.requests + worker.others < room:
                candidates.append(Candidate(worker, held.blocks + worker.other_blocks))
        return candidates

    def _prefill_candidates(
        self, demand: Demand, decode: WorkerState, uncached: int
    ) -> list[Candidate]:
        layout = decode.member.layout_fingerprint
        if not layout or uncached < self._config.remote_prefill_min_tokens:
            return []
        ready = self._ready(demand, Role.PREFILL)
        return self._candidates([w for w in ready if w.member.layout_fingerprint == layout])

    def _policy(self, model: str, role: Role) -> Policy:
        policy = self._policies.get((model, role))
        if policy is None:
            policy = self._policies[model, role] = self._new_policy()
        return policy

    def _reserve(
        self, demand: Demand, decode: Candidate, prefill: Candidate | None, uncached: int
    ) -> Reservation:
        expected = self._config.expected_completion_tokens
        completion = min(demand.max_tokens, expected) if demand.max_tokens else expected
        return self._ledger.reserve(
            decode.worker.life,
            _blocks(demand.prompt_tokens + completion, decode.worker),
            None if prefill is None else prefill.worker.life,
            _blocks(uncached, (prefill or decode).worker),
        )

    def _explain(self, decode: Candidate, prefill: Candidate | None, uncached: int) -> str:
        name = self._config.policy
        where = f"decode on {decode.id} at {decode.load_blocks:.0f} blocks"
        if prefill is None:
            return f"{name}: {where}, {uncached} uncached tokens prefilled there"
        return (
            f"{name}: {where}, {uncached} uncached tokens prefilled on {prefill.id}"
            f" at {prefill.load_blocks:.0f} blocks"
        )


def _blocks(tokens: int, worker: WorkerState) -> int:
    block_size = worker.member.block_size or FALLBACK_BLOCK_SIZE
    return -(-tokens // block_size)
