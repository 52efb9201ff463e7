"""Which workers answer a request, and why these: what is told to a caller who asks."""

from dataclasses import dataclass, field, replace

from kvmesh.types import Plan

PROMPT_LOGPROBS = "prompt_logprobs"
PREFILL_FAILED = "prefill_failed"
MIGRATED = "migrated"
NO_ROUTER = "no_router"
"""Reasons of ours, beside those of routers, for a prompt to be computed by decode."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed: at which step, whose fault that is taken to be, the reason."""

    step: str
    worker_id: str
    reason: str


@dataclass(slots=True)
class Placed:
    """Where one choice runs. `router_id` is empty where no router was reachable.

    It is the last of so many `attempts`; `failures` are those that failed, in order.
    """

    plan: Plan
    router_id: str
    prompt_tokens: int
    attempts: int = 1
    failures: list[Failure] = field(default_factory=list)


class Explanation:
    """What is known of the choices of one request, kept up to date while they are made."""

    def __init__(self, request_id: str, choices: int) -> None:
        self.request_id = request_id
        self.choices = choices
        self._placed: dict[int, Placed] = {}

    def placed(self, index: int, plan: Plan, router_id: str, prompt_tokens: int) -> None:
        """Note where a choice is to run now."""
        before = self._placed.get(index)
        placed = self._placed[index] = Placed(plan, router_id, prompt_tokens)
        if before is not None:
            placed.attempts = before.attempts + 1
            placed.failures = before.failures

    def failed(self, index: int, failure: Failure) -> None:
        """Note that an attempt at a choice failed, and that another one is made."""
        self._placed[index].failures.append(failure)

    def of(self, index: int) -> Placed | None:
        """Return where a choice runs; None: nowhere so far, or it needs no worker."""
        return self._placed.get(index)

    def first(self) -> int:
        """Return the first choice that runs somewhere; 0 if none does."""
        return min(self._placed, default=0)


def kept_local(plan: Plan, reason: str) -> Plan:
    """Return a plan without its prefill worker, where it has one."""
    return plan if plan.prefill is None else replace(plan, prefill=None, reason=reason)
