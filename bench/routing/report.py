"""What a run came to, in the figures that people compare."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.routing.mesh import Run
from kvmesh.types import Role


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer is: seconds to its first token, and between its tokens on average."""

    ttft: float = 0.5
    token: float = 0.025


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Seconds, shares of 1, and numbers a second.

    `goodput` is good answers a second and `good` their share. `imbalance` is how long the
    busiest decode worker computed, over the mean. `decisions` and `decision_p99` are CPU time
    of one core, and the only figures that differ from run to run; 0 where they were not
    measured.
    """

    requests: int
    refused: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    gap_p99: float
    rate: float
    goodput: float
    good: float
    imbalance: float
    remote: float
    decisions: float
    decision_p99: float


def summary(run: Run, slo: Slo) -> Summary:
    """Return the figures of a run."""
    served = [request for request in run.requests if not request.refused]
    ttft = [request.ttft for request in served]
    good = sum(r.ttft <= slo.ttft and r.token_seconds <= slo.token for r in served)
    busy = run.busy_seconds[Role.DECODE]
    took = run.decision_seconds
    return Summary(
        requests=len(run.requests),
        refused=len(run.requests) - len(served),
        hit_rate=sum(r.cached for r in served) / max(1, sum(r.prompt for r in served)),
        ttft_mean=statistics.fmean(ttft) if ttft else 0.0,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        gap_p50=run.gaps.quantile(0.5),
        gap_p99=run.gaps.quantile(0.99),
        rate=len(served) / run.seconds,
        goodput=good / run.seconds,
        good=good / max(1, len(run.requests)),
        imbalance=max(busy) * len(busy) / sum(busy),
        remote=sum(bool(r.prefill) for r in served) / max(1, len(served)),
        decisions=len(took) / sum(took) if took else 0.0,
        decision_p99=quantile(took, 0.99),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return what that share of the values is at most; 0 if there are none."""
    ranked = sorted(values)
    return 0.0 if not ranked else ranked[min(len(ranked) - 1, int(share * len(ranked)))]


POLICY_HEADER = (
    "| workload | policy | hit rate | TTFT p50 / p99 ms | ITL p99 ms | good/s (share) | imbalance"
    " | decisions/s | p99 ms |\n|---|---|---|---|---|---|---|---|---|"
)

PREFILL_HEADER = (
    "| prompts | load | requests/s | TTFT ms: remote | local | auto | ITL p99 ms: remote | local"
    " | auto | auto / better: TTFT | ITL | remote share of auto |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def policy_row(workload: str, policy: str, of: Summary) -> str:
    """Return a line of the table of policies."""
    return (
        f"| {workload} | {policy} | {of.hit_rate:.2f}"
        f" | {ms(of.ttft_p50)} / {ms(of.ttft_p99)} | {ms(of.gap_p99)}"
        f" | {of.goodput:.0f} ({of.good:.0%}) | {of.imbalance:.2f}"
        f" | {of.decisions:.0f} | {of.decision_p99 * 1e3:.2f} |"
    )


def ms(seconds: float) -> str:
    """Return milliseconds for people to read."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:,.0f}"
