"""Policies on simulated workers in virtual time: how much they hit, how long they take.

Nothing waits: the router's own code runs on `bench.routing`'s simulated mesh.
"""

import random
import statistics
from dataclasses import dataclass, replace

import pytest

from bench.routing.mesh import MeshConfig, simulate
from bench.routing.report import Slo, Summary, summary
from bench.routing.worker import WorkerConfig
from bench.routing.workloads import poisson, repeated_prefixes
from kvmesh.engine.sim.latency import Latency
from services.router.planner import RoutingConfig

EVERYTHING_FITS, A_THIRD_FITS = 16_384, 512

WORKLOAD = repeated_prefixes(
    prefixes=64, prefix_tokens=1530, reuse=20, own_tokens=50, completion=16
)


@dataclass(frozen=True)
class Case:
    """A load: `rate` 0 is a closed loop. `uneven` makes every other worker slower."""

    blocks: int
    rate: float = 0.0
    slower: float = 1.0
    uneven: float = 1.0
    learn: bool = True


def measure(policy: str, case: Case, seed: int) -> Summary:
    rng = random.Random(seed)
    conversations = WORKLOAD(rng, 0)
    if case.rate:
        poisson(rng, conversations, case.rate)
    config = MeshConfig(
        routing=RoutingConfig(policy=policy),
        worker=WorkerConfig(Latency(100 * case.slower), case.blocks),
        slower=case.uneven,
        concurrency=0 if case.rate else 32,
        learn=case.learn,
        seed=seed,
    )
    run = simulate(config, conversations)
    assert run.left_over == 0
    return summary(run, Slo())


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rate", [0, 60])
def test_where_everything_fits_prefixes_stay_where_they_are(rate: float, seed: int) -> None:
    case = Case(EVERYTHING_FITS, rate)
    kv, turns = measure("kv", case, seed), measure("round_robin", case, seed)

    assert kv.hit_rate >= 0.80
    assert kv.ttft_mean <= turns.ttft_mean
    assert kv.imbalance < 2


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("rate", "slower", "least"), [(0, 1, 0.9), (60, 1, 0.9), (0, 5, 0.7)])
def test_where_a_third_fits_workers_share_the_prefixes_out(
    rate: float, slower: float, least: float, seed: int
) -> None:
    case = Case(A_THIRD_FITS, rate, slower)
    kv, turns = measure("kv", case, seed), measure("round_robin", case, seed)

    assert kv.hit_rate >= 0.62
    assert kv.ttft_mean <= least * turns.ttft_mean


def test_workers_that_turn_out_slow_are_given_less() -> None:
    case = Case(A_THIRD_FITS, rate=60, uneven=5)
    mean = {
        learn: statistics.mean(
            measure("kv", replace(case, learn=learn), seed).ttft_mean for seed in (1, 2, 3)
        )
        for learn in (True, False)
    }

    assert mean[True] < mean[False]
