"""Routing at scale, in virtual time: the router's own code over simulated workers.

Workers have the sim engine's latency and a real block pool, routers the service's own
dispatcher, planner, prefix index and event watchers; only time and transport are made up.
Two tables:

* policies on 8, 100 and 1,000 workers that compute prompts themselves, by workload;
* prompts computed remotely, locally or as costs tell, on 4 prefill and 4 decode workers,
  by length and load (1: all that the prefill workers can compute).

A good answer has its first token and a mean gap between tokens within the limits given.
Decisions are timed in CPU time of one core; all else depends on --seed alone.
"""

import argparse
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.routing.feed import Wire
from bench.routing.mesh import MeshConfig, simulate
from bench.routing.prefill import MIXED_RATES, compare, mixed, prompts_of
from bench.routing.report import (
    POLICY_HEADER,
    PREFILL_HEADER,
    Slo,
    Summary,
    policy_row,
    prefill_row,
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

LENGTHS, LOADS = (100, 500, 2000, 8000, 16_000), (0.02, 0.3, 0.6, 0.85, 1.0)

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


def _prefill(options: argparse.Namespace) -> None:
    """Print the table of remote, local and by cost, and draw it."""
    print(f"\n4 prefill and 4 decode workers, {options.routers} routers\n\n{PREFILL_HEADER}")
    lengths, loads = (LENGTHS[1::2], LOADS[1::2]) if options.quick else (LENGTHS, LOADS)
    drawn: dict[str, list[tuple[float, Mapping[str, Summary]]]] = {}
    for tokens in lengths:
        prompts = f"{tokens:,} tokens"
        for load in loads:
            found = compare(prompts_of(tokens, load), routers=options.routers, seed=options.seed)
            drawn.setdefault(prompts, []).append((load, found))
            print(prefill_row(prompts, f"{load:g}", found), flush=True)
    for rate in MIXED_RATES[1::2] if options.quick else MIXED_RATES:
        found = compare(mixed(rate), routers=options.routers, seed=options.seed)
        drawn.setdefault("mixed, requests/s", []).append((rate, found))
        print(prefill_row("mixed", f"{rate:g}/s", found), flush=True)
    if options.plots:
        from bench.routing.plots import draw_prefill  # noqa: PLC0415

        path = options.plots / "prefill.png"
        draw_prefill(path, "4 prefill and 4 decode workers", drawn)
        print(f"\n{path}")


if __name__ == "__main__":
    main()
