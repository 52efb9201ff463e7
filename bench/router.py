"""Route decisions: how many a second, how long they take, and what the prefix index weighs.

    python -m bench.router [--workers 8 100 1000] [--blocks 100 250 500 1000] [--prefill auto]

One core, no sockets, CPU time: demands go straight to the planner, which walks the index, scores
every worker, picks and reserves; their ends are not timed. The garbage collector runs as it does
in the service, its pauses included. Prompts share a system prefix that a tenth of the workers
have, then a conversation that one has. With `--prefill remote` or `auto` every other worker is a
prefill worker.
"""

import argparse
import gc
import random
import resource
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from kvmesh.types import CacheSnapshot, Member, Role, State, WorkerNews
from services.router.index import PrefixIndex
from services.router.planner import Decision, Planner, Prefill, RoutingConfig
from services.router.plugins import Policies
from services.router.policy import Demand
from services.router.reservations import Ledger, Life, Reservation
from services.router.state import Fleet

BLOCK_SIZE = 16
CONVERSATIONS = 500
RUNNING = 4  # requests per worker at any time


def main() -> None:
    """Run all sizes and print one line each."""
    options = _options()
    gc.freeze()  # as the service does
    how = f"policy {options.policy}, prefill {options.prefill}"
    print(f"{how}, {options.decisions} decisions each\n")
    print("| workers | blocks | decisions/s | p50 ms | p99 ms |\n|---|---|---|---|---|")
    growth = []
    for workers in options.workers:
        medians = []
        for blocks in options.blocks:
            routing = RoutingConfig(policy=options.policy, prefill=options.prefill)
            took = _decisions(routing, workers, blocks, options.decisions)
            cuts = statistics.quantiles(took, n=100)
            rate = len(took) / sum(took)
            line = f"| {workers} | {blocks} | {rate:.0f} |"
            print(f"{line} {cuts[49] * 1e3:.3f} | {cuts[98] * 1e3:.3f} |", flush=True)
            medians.append((blocks, cuts[49]))
        growth.append(_growth(workers, medians))
    print("\n| workers | blocks | times the blocks | times the p50 |\n|---|---|---|---|")
    print("\n".join(growth))
    print("\n| seats | holders of a block | bytes per million blocks |\n|---|---|---|")
    for seats, holders in ((8, 1), (100, 1), (1000, 1), (100, 4), (1000, 40)):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            used = fresh.submit(_memory, seats, holders).result()
        print(f"| {seats} | {holders} | {used / 1e6:.0f} MB |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 100, 1000])
    parser.add_argument("--blocks", type=int, nargs="+", default=[100, 250, 500, 1000])
    parser.add_argument("--policy", default="kv")
    parser.add_argument("--prefill", type=Prefill, choices=list(Prefill), default=Prefill.LOCAL)
    parser.add_argument("--decisions", type=int, default=2000)
    return parser.parse_args()


def _decisions(routing: RoutingConfig, workers: int, blocks: int, count: int) -> list[float]:
    """Return the seconds that each decision took."""
    rng = random.Random(1)
    ledger = Ledger()
    fleet = Fleet(ledger)
    planner = Planner(fleet, ledger, routing, Policies(routing.policy), rng)
    shared = [rng.getrandbits(64) for _ in range(blocks // 2)]
    prompts = [
        tuple(shared + [rng.getrandbits(64) for _ in range(blocks - len(shared))])
        for _ in range(CONVERSATIONS)
    ]
    apart = routing.prefill is not Prefill.LOCAL
    _populate(fleet, workers, shared, prompts, apart=apart)
    running: deque[Reservation] = deque()
    took = []
    gc.collect()
    for number in range(count):
        hashes = rng.choice(prompts)
        demand = Demand(f"r{number}", "m", blocks * BLOCK_SIZE + 7, 128, hashes, BLOCK_SIZE)
        begin = time.thread_time()
        decision = planner.plan(demand)
        took.append(time.thread_time() - begin)
        assert isinstance(decision, Decision)
        running.append(decision.reservation)
        if len(running) > RUNNING * workers:
            ledger.release(running.popleft())
    return took


def _growth(workers: int, medians: Sequence[tuple[int, float]]) -> str:
    """Return a line of how the time grows from the fewest blocks to the most."""
    (few, short), (many, long) = min(medians), max(medians)
    return f"| {workers} | {few} to {many} | {many / few:.2f} | {long / short:.2f} |"


def _populate(
    fleet: Fleet,
    workers: int,
    shared: list[int],
    prompts: list[tuple[int, ...]],
    *,
    apart: bool,
) -> None:
    names = [f"d{number:04}" for number in range(workers)]
    fleet.update(
        Member(
            id=name,
            role=Role.PREFILL if apart and number % 2 else Role.DECODE,
            epoch="e1",
            address=name,
            state=State.READY,
            model="m",
            block_size=BLOCK_SIZE,
            total_blocks=100_000,
            layout_fingerprint="layout",
        )
        for number, name in enumerate(names)
    )
    for number, name in enumerate(names):
        cached = list(shared) if number % 10 == 0 else []
        for prompt in prompts[number::workers]:
            cached += prompt
        news = WorkerNews(name, "e1", 1, (CacheSnapshot(cached),))
        fleet.apply(Life(name, "e1"), news)


def _memory(seats: int, holders: int) -> float:
    """Return the bytes of an index of a million blocks, each held by so many of the seats."""
    rng = random.Random(2)
    count = 1_000_000
    gc.collect()
    before = _resident()
    index = PrefixIndex()
    open_seats = [index.open() for _ in range(seats)]
    for _ in range(0, count, 500):
        hashes = [rng.getrandbits(64) for _ in range(500)]
        for seat in rng.sample(open_seats, holders):
            index.store(seat, hashes, count)
    used = _resident() - before
    assert len(index) == count
    return used


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
