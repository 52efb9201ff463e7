"""Routing at scale, in virtual time: the router's own code over simulated workers.

Workers have the sim engine's latency and a real block pool, routers the service's own
dispatcher, planner, prefix index and event watchers; only time and transport are made up.
Two tables:

* policies on 8, 100 and 1,000 workers that compute prompts themselves, by workload;
* prompts computed remotely, locally or as costs tell, by length and load, with Poisson
  arrivals that are the same for all three. Load 1 is where the mesh saturates: the rate at
  which the first of always-remote and always-local can't keep up. Ratios are of `auto` over
  the better of these two, of the seed in which it is worst. `--workers` without a number
  leaves the first table out.

A good answer has its first token and a mean gap between tokens within the limits given.
Decisions are timed in CPU time of one core; all else depends on --seed alone.
"""

import argparse
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.routing.feed import Wire
from bench.routing.mesh import MeshConfig, simulate
from bench.routing.prefill import (
    COMPLETION,
    LENGTHS,
    LOADS,
    REQUESTS,
    Cell,
    Compared,
    Layout,
    mixed,
    over_seeds,
    prompts_of,
    row,
)
from bench.routing.report import (
    POLICY_HEADER,
    PREFILL_HEADER,
    Slo,
    Summary,
    policy_row,
    summary,
)
from bench.routing.request import Conversation
from bench.routing.traces import read_trace, write_trace
from bench.routing.worker import WorkerConfig
from bench.routing.workloads import WORKLOADS, in_bursts, poisson
from services.router.planner import RoutingConfig
from services.router.policies import BUILT_IN

TRACE = "trace"
LARGE = 500
"""From so many workers on, only the first workload runs unless others are asked for."""

Found = dict[str, dict[str, Summary]]


def main() -> None:
    """Do what the options say."""
    options = _options()
    logging.getLogger("services.router").setLevel(logging.ERROR)
    if options.write_trace:
        rng = random.Random(options.seed)
        write_trace(options.write_trace, requests=options.requests or 1000, rate=20, rng=rng)
        return
    if options.plots:
        _need_plots(options.plots)
    for workers in options.workers:
        _policies(options, workers)
    if options.prefill:
        _prefill(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.router_sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="8 workers, few requests: some seconds in all")
    add("--workers", type=int, nargs="*", metavar="N", help="sizes; default: 8 100 1000")
    add("--policies", nargs="+", choices=sorted(BUILT_IN), default=sorted(BUILT_IN), metavar="NAME",
        help=f"default: {' '.join(sorted(BUILT_IN))}")  # fmt: skip
    add("--workloads", nargs="+", choices=list(WORKLOADS), metavar="NAME",
        help=f"default: {' '.join(WORKLOADS)}; from {LARGE} workers on the first")  # fmt: skip
    add("--requests", type=int, metavar="N", help="of each run; default: by workers")
    add("--load", type=float, default=1.0, metavar="X", help="times the usual rate of requests")
    add("--concurrency", type=int, default=0, metavar="N",
        help="a closed loop of N clients for each worker, instead of a rate")  # fmt: skip
    add("--routers", type=int, default=2, metavar="N", help="default: 2")
    add("--delay-ms", type=float, default=5.0, metavar="MS", help="of events; default: 5")
    add("--loss", type=float, default=0.001, metavar="SHARE",
        help="of event messages; default: 0.001")  # fmt: skip
    add("--blocks", type=int, default=4096, metavar="N",
        help="KV blocks of 64 tokens in each worker; default: 4096")  # fmt: skip
    add("--slo-ttft-ms", type=float, default=500.0, metavar="MS", help="default: 500")
    add("--slo-itl-ms", type=float, default=25.0, metavar="MS", help="default: 25")
    add("--trace", type=Path, metavar="FILE", help="a Mooncake-style trace as the workload")
    add("--trace-speed", type=float, default=1.0, metavar="X", help="times as fast as it came")
    add("--write-trace", type=Path, metavar="FILE", help="write a made-up trace, and end")
    add("--no-prefill", dest="prefill", action="store_false", help="leave out the second table")
    add("--layout", type=_layout, default=(4, 4), metavar="P+D",
        help="prefill and decode workers of the second table; default: 4+4")  # fmt: skip
    add("--completion", type=int, default=COMPLETION, metavar="N",
        help="tokens of its answers; default: 128, mixed 64 to 256")  # fmt: skip
    add("--seeds", type=int, default=3, metavar="N",
        help="of the second table, from --seed on; default: 3")  # fmt: skip
    add("--plots", type=Path, metavar="DIR", help="draw PNG files there (needs matplotlib)")
    add("--seed", type=int, default=1, metavar="N", help="default: 1")
    options = parser.parse_args()
    if options.workers is None:
        options.workers = [8] if options.quick else [8, 100, 1000]
    return options


def _need_plots(folder: Path) -> None:
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError:
        sys.exit("--plots needs matplotlib: install the extra `bench`")
    folder.mkdir(parents=True, exist_ok=True)


def _policies(options: argparse.Namespace, workers: int) -> None:
    """Print the table of one size, and draw it."""
    print(f"\n{workers} workers, {options.routers} routers\n\n{POLICY_HEADER}")
    found: Found = {}
    for workload in _workloads(options, workers):
        found[workload] = {}
        for policy in options.policies:
            result = _run(options, workers, workload, policy)
            found[workload][policy] = result
            print(policy_row(workload, policy, result), flush=True)
    if options.plots:
        from bench.routing.plots import draw_policies  # noqa: PLC0415

        path = options.plots / f"policies-{workers}.png"
        draw_policies(path, f"{workers} workers, {options.routers} routers", found)
        print(f"\n{path}")


def _workloads(options: argparse.Namespace, workers: int) -> Sequence[str]:
    if options.trace:
        return [TRACE]
    if options.workloads:
        return list(options.workloads)
    return list(WORKLOADS)[:1] if workers >= LARGE else list(WORKLOADS)


def _run(options: argparse.Namespace, workers: int, workload: str, policy: str) -> Summary:
    config = MeshConfig(
        routing=RoutingConfig(policy=policy),
        decode=workers,
        routers=options.routers,
        worker=WorkerConfig(blocks=options.blocks),
        wire=Wire(options.delay_ms / 1e3, options.delay_ms / 1e3, options.loss),
        concurrency=options.concurrency * workers,
        seed=options.seed,
        timed=True,
    )
    run = simulate(config, _conversations(options, workers, workload))
    return summary(run, Slo(options.slo_ttft_ms / 1e3, options.slo_itl_ms / 1e3))


def _conversations(
    options: argparse.Namespace, workers: int, workload: str
) -> Sequence[Conversation]:
    """Return the same conversations for each policy."""
    if workload == TRACE:
        return read_trace(options.trace, limit=options.requests, speed=options.trace_speed)
    usual = 300 if options.quick else 1500 if workers < 50 else 4000
    rng, shape = random.Random(f"{workload} {options.seed}"), WORKLOADS[workload]
    conversations = shape.make(rng, options.requests or usual)
    pace = in_bursts if shape.bursts else poisson
    return pace(rng, conversations, shape.rate * options.load * workers)


def _layout(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition("+")
    return int(prefill), int(decode)


def _prefill(options: argparse.Namespace) -> None:
    """Print the table of remote, local and by cost, and draw it."""
    prefill, decode = options.layout
    layout = Layout(prefill, decode, options.routers)
    title = f"{prefill} prefill and {decode} decode workers"
    print(f"\n{title}, {options.routers} routers\n\n{PREFILL_HEADER}")
    drawn: dict[str, list[tuple[float, Compared]]] = {}
    for prompts, load, cell in _cells(options, layout):
        found = over_seeds(cell, layout, range(options.seed, options.seed + options.seeds))
        drawn.setdefault(prompts, []).append((load, found))
        print(row(prompts, load, cell, found), flush=True)
    cells = [found for points in drawn.values() for _, found in points]
    ttft, gap = max(c.ttft_ratio for c in cells), max(c.gap_ratio for c in cells)
    print(f"\nworst ratio of auto to the better: TTFT {ttft:.3f}, ITL p99 {gap:.3f}")
    if options.plots:
        from bench.routing.plots import draw_prefill  # noqa: PLC0415

        path = options.plots / "prefill.png"
        draw_prefill(path, title, drawn)
        print(f"\n{path}")


def _cells(options: argparse.Namespace, layout: Layout) -> Iterator[tuple[str, float, Cell]]:
    """Yield each kind of prompts at each load."""
    lengths, loads = (LENGTHS[1::2], LOADS[1::2]) if options.quick else (LENGTHS, LOADS)
    requests, completion = options.requests or REQUESTS, options.completion
    for tokens in lengths:
        for load in loads:
            cell = prompts_of(tokens, load, layout, completion=completion, requests=requests)
            yield f"{tokens:,} tokens", load, cell
    various = 0 if completion == COMPLETION else completion
    for load in loads:
        yield "mixed", load, mixed(load, layout, completion=various, requests=requests)


if __name__ == "__main__":
    main()
