"""Remote, local or decided by cost: where prompts are computed, over lengths and loads.

The load of a cell is its rate of requests over the rate at which the mesh saturates: the
lesser of what it carries with all prompts computed remotely and with all computed locally.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.routing.mesh import MeshConfig, simulate
from bench.routing.report import Slo, Summary, ms, summary
from bench.routing.request import BLOCK, Conversation
from bench.routing.worker import WorkerConfig
from bench.routing.workloads import Workload, fixed, mixed_lengths, poisson
from services.router.planner import Prefill, RoutingConfig

TOLERANCE = 1.05
"""How much worse than the better one is as good, as a factor."""

COMPLETION = 128
"""Tokens of each answer, unless told; of the mixed workload their mean is 160."""

LENGTHS: Sequence[int] = (100, 500, 2000, 8000, 16_000)
"""Tokens of the prompts of a sweep."""

LOADS: Sequence[float] = (0.02, 0.25, 0.5, 0.75, 0.9)
"""Loads of a sweep, from nearly idle on."""

IDLE = 0.1
"""Below this load hardly any requests meet, and few of them tell as much as many."""

REQUESTS = 1000
"""Requests of a cell: with 16 tokens each, 150 of the gaps are above the 99th percentile."""


@dataclass(frozen=True, slots=True)
class Layout:
    """So many workers of each role, behind so many routers."""

    prefill: int = 4
    decode: int = 4
    routers: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of prompts at one load, in requests a second."""

    prompts: Workload
    rate: float
    requests: int


def prompts_of(
    tokens: int,
    load: float,
    layout: Layout,
    *,
    completion: int = COMPLETION,
    requests: int = REQUESTS,
) -> Cell:
    """Return prompts of one length that have nothing in common."""
    return _cell(fixed(tokens, completion), load, layout, requests)


def mixed(load: float, layout: Layout, *, completion: int = 0, requests: int = REQUESTS) -> Cell:
    """Return short chat with a long document now and then. `completion` 0: of many lengths."""
    return _cell(mixed_lengths(completion), load, layout, requests)


def saturation(conversations: Sequence[Conversation], layout: Layout) -> float:
    """Return the requests a second that the mesh can carry whichever way prompts go."""
    return min(carried(conversations, layout))


def carried(conversations: Sequence[Conversation], layout: Layout) -> tuple[float, float]:
    """Return the requests a second that can be carried remotely, and locally.

    From the latency model: all workers always busy, decode steps as full as they may be.
    Prefixes that several prompts share are computed once.
    """
    worker = WorkerConfig()
    latency, requests = worker.latency, [r for each in conversations for r in each.turns]
    mean = 1 / len(requests)
    uncached, seen = 0, set[int]()
    for request in requests:
        uncached += request.prompt - BLOCK * sum(h in seen for h in request.prompt_hashes)
        seen.update(request.prompt_hashes)
    prompt = uncached * mean
    completion = sum(r.completion for r in requests) * mean
    held = sum(r.prompt + r.completion for r in requests) * mean
    batch = min(worker.max_batch, worker.blocks * BLOCK / held)
    step = latency.step_seconds(0, 1, int(held)) - latency.step_seconds(0, 1, 0)
    step += latency.step_seconds(0, int(batch), 0) / batch
    computing = latency.step_seconds(int(prompt), 0, 0)
    remote = min(layout.prefill / computing, layout.decode / (completion * step))
    return remote, layout.decode / (computing + completion * step)


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell over several seeds, by setting: what each made of the same requests.

    Figures are means over the seeds, in seconds; `ttft_ratio` and `gap_ratio` are those of the
    seed in which `auto` was worst against the better of the other two.
    """

    ttft: Mapping[str, float]
    gap_p99: Mapping[str, float]
    remote: float
    ttft_ratio: float
    gap_ratio: float


def row(prompts: str, load: float, cell: Cell, found: Compared) -> str:
    """Return a line of the table under `PREFILL_HEADER`."""
    modes = (Prefill.REMOTE, Prefill.LOCAL, Prefill.AUTO)
    ttft = " | ".join(ms(found.ttft[mode]) for mode in modes)
    gaps = " | ".join(ms(found.gap_p99[mode]) for mode in modes)
    return (
        f"| {prompts} | {load:g} | {cell.rate:.3g} | {ttft} | {gaps}"
        f" | {found.ttft_ratio:.3f} | {found.gap_ratio:.3f} | {found.remote:.2f} |"
    )


def over_seeds(cell: Cell, layout: Layout, seeds: Sequence[int]) -> Compared:
    """Compare with each seed."""
    runs = [compare(cell, layout, seed=seed) for seed in seeds]
    ratios = [over_the_better(found) for found in runs]
    return Compared(
        {mode.value: fmean(found[mode].ttft_mean for found in runs) for mode in Prefill},
        {mode.value: fmean(found[mode].gap_p99 for found in runs) for mode in Prefill},
        fmean(found[Prefill.AUTO].remote for found in runs),
        max(ttft for ttft, _ in ratios),
        max(gap for _, gap in ratios),
    )


def compare(cell: Cell, layout: Layout, *, seed: int = 1) -> Mapping[str, Summary]:
    """Return what each of the three settings makes of the same requests on the same workers."""
    found = {}
    for mode in Prefill:
        rng = random.Random(seed)
        conversations = poisson(rng, cell.prompts(rng, cell.requests), cell.rate)
        config = MeshConfig(
            routing=RoutingConfig(prefill=mode),
            decode=layout.decode,
            prefill=layout.prefill,
            routers=layout.routers,
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


def _cell(prompts: Workload, load: float, layout: Layout, requests: int) -> Cell:
    rate = saturation(prompts(random.Random(0), REQUESTS), layout) * load
    return Cell(prompts, rate, requests if load >= IDLE else max(100, requests // 5))
