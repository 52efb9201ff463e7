"""One decision: filter, score, pick, reserve. Pure but for what it reserves."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from kvmesh.types import Plan, Role
from services.router.audit import NO_CLAIM, CacheClaim
from services.router.candidates import Candidates, with_room
from services.router.cost import GIGA, CostConfig, Work
from services.router.plugins import Policies
from services.router.policies import KvAware
from services.router.policy import Candidate, Demand, Policy
from services.router.quarantine import QuarantineConfig
from services.router.reservations import Ledger, Reservation
from services.router.split import split
from services.router.state import Fleet
from services.router.worker import WorkerState


class Prefill(StrEnum):
    """Where prompts are computed, if there is a choice. Values are those of settings."""

    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


class PrefillReason(StrEnum):
    """Why a prompt is computed where it is. Values are those of `RoutePlan.reason`."""

    CONFIGURED = "configured"
    CHEAPER = "cheaper"
    SHORT = "short"
    NO_LAYOUT = "no_layout"
    NO_WORKER = "no_worker"
    QUARANTINED = "quarantined"
    FULL = "full"


class Mismatch(StrEnum):
    """What is done about workers whose cache hits are not those that they claim."""

    IGNORE_CACHE = "ignore_cache"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """What decisions depend on.

    Of a completion only what is expected is reserved: most end long before the most
    they are allowed.
    """

    policy: str = field(
        default="kv",
        metadata={
            "help": "how workers are picked: kv, least_loaded, power_of_two, random,"
            " round_robin, session or a plug-in"
        },
    )
    policy_by_model: tuple[str, ...] = field(
        default=(), metadata={"help": "other policies for some models, as model=policy"}
    )
    prefill: Prefill = field(
        default=Prefill.REMOTE,
        metadata={"help": "where prompts are computed: auto, by estimated time"},
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
    mismatch: Mismatch = field(
        default=Mismatch.IGNORE_CACHE,
        metadata={
            "help": "what to do about workers whose cache hits are not those they claim: take "
            "what they have cached for nothing, or flag them only"
        },
    )
    cost: CostConfig = field(default_factory=CostConfig)
    quarantine: QuarantineConfig = field(default_factory=QuarantineConfig)


class Blocked(Enum):
    """Why there is no plan now."""

    NO_WORKER = "no worker"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, the reservation taken for it, and what it was chosen from.

    `chosen` is what the prompt is to the worker that computes it, `claim` what that one
    should have cached of it, whether or not it is believed. Scores are those of the
    candidates, in their order; the lower, the better.
    """

    plan: Plan
    reservation: Reservation
    policy: str
    chosen: Work
    decode_candidates: Sequence[Candidate]
    decode_scores: Sequence[float]
    prefill_candidates: Sequence[Candidate] = ()
    prefill_scores: Sequence[float] = ()
    claim: CacheClaim = NO_CLAIM


class Planner:
    """Turns demands into plans."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        config: RoutingConfig,
        policies: Policies,
        rng: random.Random,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._config = config
        self._policies = policies
        self._rng = rng
        self._pools: dict[tuple[str, Role], Policy] = {}

    def configure(self, config: RoutingConfig, policies: Policies) -> None:
        """Decide by other settings from now on. A policy that stays keeps what it knows."""
        old, self._config, self._policies = self._policies, config, policies
        if self._fleet.quarantine is not None:
            self._fleet.quarantine.config = config.quarantine
        self._pools = {
            (model, role): policy
            for (model, role), policy in self._pools.items()
            if old.name(model) == policies.name(model)
        }

    def plan(self, demand: Demand) -> Decision | Blocked:
        """Choose workers and reserve room on them, or say why that can't be done now.

        The reservation weighs on the very next decision: a burst spreads.
        """
        ready = self._ready(demand, Role.DECODE)
        if not ready:
            return Blocked.NO_WORKER
        quarantine = self._fleet.quarantine
        if quarantine is not None:
            ready = quarantine.trusted(ready)
        claimed = self._overlaps(demand)
        overlaps = self._believed(demand, claimed)
        candidates = self._candidates(ready, demand, overlaps, Role.DECODE)
        if not candidates:
            return Blocked.FULL
        decode, scores = self._pick(candidates, demand, Role.DECODE)
        reason, prefill_candidates = self._prefill_candidates(demand, decode, overlaps)
        prefill: Candidate | None = None
        prefill_scores: Sequence[float] = ()
        if prefill_candidates:
            prefill, prefill_scores = self._pick(prefill_candidates, demand, Role.PREFILL)
            if self._config.prefill is Prefill.AUTO:
                decode, prefill = self._split(demand, candidates, decode, prefill)
        computing = prefill or decode
        policy = self._policies.name(demand.model)
        plan = Plan(
            decode=decode.worker.reference(),
            prefill=None if prefill is None else prefill.worker.reference(),
            expected_cached_tokens=computing.cached_tokens,
            why=_explain(policy, decode, prefill),
            policy=policy,
            reason=reason.value,
        )
        return Decision(
            plan,
            self._reserve(demand, decode, prefill),
            policy,
            computing.work,
            candidates,
            scores,
            prefill_candidates,
            prefill_scores,
            self._claim(demand, computing.worker, claimed),
        )

    def tokens(self, demand: Demand) -> int:
        """Return how much work a request is, before it is known what is cached."""
        return demand.prompt_tokens + self._completion(demand)

    def has_worker(self, demand: Demand) -> bool:
        """Return whether any decode worker could take the demand, with or without room."""
        return bool(self._ready(demand, Role.DECODE))

    def _ready(self, demand: Demand, role: Role) -> Sequence[WorkerState]:
        ready = self._fleet.routable(demand.model, role)
        if demand.excluded:
            return [w for w in ready if w.id not in demand.excluded]
        return ready

    def _overlaps(self, demand: Demand) -> Mapping[int, int]:
        """Return how many of the prompt's leading blocks each seat of its index has.

        Whole blocks, and never the whole prompt: engines compute at least its last token
        anew.
        """
        index = self._fleet.index(demand.model, demand.block_size)
        if index is None:
            return {}
        usable = max(0, demand.prompt_tokens - 1) // demand.block_size
        return index.overlaps(demand.block_hashes[:usable])

    def _believed(self, demand: Demand, claimed: Mapping[int, int]) -> Mapping[int, int]:
        """Return the overlaps with those workers whose caches count."""
        doubted = self._fleet.doubted
        if not doubted or self._config.mismatch is Mismatch.FLAG:
            return claimed
        index = self._fleet.index(demand.model, demand.block_size)
        seats = {worker.seat for worker in doubted if worker.index is index}
        return {seat: blocks for seat, blocks in claimed.items() if seat not in seats}

    def _claim(self, demand: Demand, worker: WorkerState, claimed: Mapping[int, int]) -> CacheClaim:
        """Return what a worker should have cached of a prompt."""
        index, size = worker.index, worker.block_size
        blocks = claimed.get(worker.seat, 0)
        if index is None or not blocks or size != demand.block_size:
            return NO_CLAIM
        return CacheClaim(
            index.stored(worker.seat, demand.block_hashes[:blocks]) * size, blocks * size
        )

    def _candidates(
        self,
        workers: Sequence[WorkerState],
        demand: Demand,
        overlaps: Mapping[int, int],
        role: Role,
    ) -> Candidates:
        """Return those workers that have room, with what weighs on them."""
        return with_room(
            self._fleet.standings(workers),
            demand,
            overlaps,
            completion=self._completion(demand) if role is Role.DECODE else 0,
            max_requests=self._config.max_requests_per_worker,
            prefill_us=self._prefill_us(workers),
        )

    def _pick(
        self, candidates: Sequence[Candidate], demand: Demand, role: Role
    ) -> tuple[Candidate, Sequence[float]]:
        policy, costs = self._policy(demand.model, role), self._config.cost
        scores = policy.score(candidates, demand, costs)
        return candidates[policy.pick(scores, costs, self._rng)], scores

    def _prefill_candidates(
        self, demand: Demand, decode: Candidate, overlaps: Mapping[int, int]
    ) -> tuple[PrefillReason, Sequence[Candidate]]:
        """Return who could compute the prompt; nobody: why the decode worker does."""
        config, layout = self._config, decode.worker.member.layout_fingerprint
        if config.prefill is Prefill.LOCAL:
            return PrefillReason.CONFIGURED, []
        if not layout:
            return PrefillReason.NO_LAYOUT, []
        if decode.work.uncached < config.remote_prefill_min_tokens:
            return PrefillReason.SHORT, []
        ready = self._ready(demand, Role.PREFILL)
        fitting = [w for w in ready if w.member.layout_fingerprint == layout]
        if not fitting:
            return PrefillReason.NO_WORKER, []
        trusted: Sequence[WorkerState] = fitting
        if self._fleet.quarantine is not None:
            trusted = self._fleet.quarantine.partners(decode.worker.life, fitting)
        candidates = self._candidates(trusted, demand, overlaps, Role.PREFILL)
        if not candidates:
            return PrefillReason.FULL if trusted else PrefillReason.QUARANTINED, []
        remote = config.prefill is Prefill.REMOTE
        return PrefillReason.CONFIGURED if remote else PrefillReason.CHEAPER, candidates

    def _split(
        self, demand: Demand, candidates: Candidates, picked: Candidate, prefill: Candidate
    ) -> tuple[Candidate, Candidate | None]:
        """Return who decodes, and the prefill worker if it is to compute the prompt.

        Policies that go by more than costs have the last word on who decodes.
        """
        costs = self._config.cost
        token_bytes = self._fleet.token_bytes(demand.model) or costs.kv_bytes_per_token
        configured = 1 / (costs.transfer_gb_per_second * GIGA)
        token_seconds = token_bytes * (self._fleet.byte_seconds(demand.model) or configured)
        fitting: Sequence[Candidate] = [picked]
        if isinstance(self._policy(demand.model, Role.DECODE), KvAware):
            layout, quarantine = picked.worker.member.layout_fingerprint, self._fleet.quarantine

            def fits(worker: WorkerState) -> bool:
                return worker.member.layout_fingerprint == layout and (
                    quarantine is None or bool(quarantine.partners(worker.life, [prefill.worker]))
                )

            fitting = candidates.where(fits)
        chosen = split(fitting, prefill, token_seconds, costs, self._rng)
        return (chosen.remote, prefill) if chosen.remotely else (chosen.local, None)

    def _policy(self, model: str, role: Role) -> Policy:
        policy = self._pools.get((model, role))
        if policy is None:
            policy = self._pools[model, role] = self._policies.make(model)
        return policy

    def _prefill_us(self, workers: Sequence[WorkerState]) -> float:
        """Return how long a prompt token takes on those of whom it is not known."""
        typical = self._fleet.speeds.typical(workers[0].pool) if workers else 0.0
        return typical or self._config.cost.prefill_us_per_token

    def _completion(self, demand: Demand) -> int:
        """Return how many tokens the completion is expected to have."""
        expected = self._config.expected_completion_tokens
        return min(demand.max_tokens, expected) if demand.max_tokens else expected

    def _reserve(self, demand: Demand, decode: Candidate, prefill: Candidate | None) -> Reservation:
        computing = prefill or decode
        reservation = self._ledger.reserve(
            decode.worker.life,
            _blocks(demand.prompt_tokens + self._completion(demand), decode.worker),
            None if prefill is None else prefill.worker.life,
            _blocks(computing.work.uncached, computing.worker),
        )
        workers = [decode.worker] if prefill is None else [decode.worker, prefill.worker]
        expectations = [
            self._fleet.expect(worker, demand.block_hashes, demand.block_size) for worker in workers
        ]
        reservation.expected = [each for each in expectations if each is not None]
        quarantine = self._fleet.quarantine
        if quarantine is not None:
            reservation.trial = quarantine.trial(reservation.decode, reservation.prefill)
        return reservation


def _explain(policy: str, decode: Candidate, prefill: Candidate | None) -> str:
    where = f"{policy}: decode on {decode.id} at {decode.load_blocks:.0f} blocks"
    uncached = decode.work.uncached
    if prefill is None:
        return f"{where}, {uncached} uncached tokens prefilled there"
    return (
        f"{where}, {uncached} uncached tokens prefilled on {prefill.id}"
        f" at {prefill.load_blocks:.0f} blocks"
    )


def _blocks(tokens: float, worker: WorkerState) -> int:
    return -(-int(tokens) // worker.block_size)
