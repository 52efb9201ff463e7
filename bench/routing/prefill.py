"""Remote, local or decided by cost: where prompts are computed, over lengths and loads."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from bench.routing.mesh import MeshConfig, simulate
from bench.routing.report import Slo, Summary, summary
from bench.routing.worker import WorkerConfig
from bench.routing.workloads import Workload, fixed, mixed_lengths, poisson
from services.router.planner import Prefill, RoutingConfig

TOLERANCE = 1.05
"""How much worse than the better one is as good, as a factor."""

COMPLETION = 128

MIXED_RATES = (1.0, 4.0, 8.0, 12.0, 16.0)
"""Requests a second of the mixed workload on four prefill and four decode workers."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of prompts at one load, in requests a second."""

    prompts: Workload
    rate: float
    requests: int


def prompts_of(tokens: int, load: float, *, workers: int = 4, completion: int = COMPLETION) -> Cell:
    """Return prompts of one length at so much of what so many prefill workers can compute.

    Fewer where the workers are mostly idle: nothing queues there that would take its time.
    """
    seconds = tokens * WorkerConfig().latency.prefill_us_per_token * 1e-6
    requests = 400 if load >= 0.1 else 100
    return Cell(fixed(tokens, completion), load * workers / seconds, requests)


def mixed(rate: float) -> Cell:
    """Return short chat with a long document now and then."""
    return Cell(mixed_lengths, rate, 800)


def compare(
    cell: Cell, *, prefill: int = 4, decode: int = 4, routers: int = 1, seed: int = 1
) -> Mapping[str, Summary]:
    """Return what each of the three settings makes of the same requests on the same workers."""
    found = {}
    for mode in Prefill:
        rng = random.Random(seed)
        conversations = poisson(rng, cell.prompts(rng, cell.requests), cell.rate)
        config = MeshConfig(
            routing=RoutingConfig(prefill=mode),
            decode=decode,
            prefill=prefill,
            routers=routers,
            seed=seed,
        )
        found[mode.value] = summary(simulate(config, conversations), Slo())
    return found


def over_the_better(found: Mapping[str, Summary]) -> tuple[float, float]:
    """Return mean TTFT and p99 between tokens by cost, over the better of the other two."""
    remote, local, auto = (found[mode] for mode in (Prefill.REMOTE, Prefill.LOCAL, Prefill.AUTO))
    return (
        auto.ttft_mean / min(remote.ttft_mean, local.ttft_mean),
        auto.gap_p99 / min(remote.gap_p99, local.gap_p99),
    )
