"""KV pulls between two processes: our transport against raw NIXL and against memcpy.

    python -m bench.kv [--transport nixl|local] [--rounds N] [--json FILE]

For each size and number of blocks the three take turns at the same pieces, in shuffled order:
a pull through the transport, by a ticket; a read by a bare NIXL agent from the
same holder into memory of its own; and a copy of the pieces within one process. Printed
are medians, and of each turn's ratios of the first to the other two. UCX_TLS applies.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from kvmesh.clock import SystemClock
from kvmesh.kv.base import KvTransport, PoolLayout
from kvmesh.kv.nixl_agent import load
from kvmesh.kv.nixl_messages import Region, Site, parse_offer
from kvmesh.kv.transports import BACKENDS, open_host_pool

KB, MB = 1 << 10, 1 << 20
SHAPES = (
    (16 * KB, (1, 64, 2048)),
    (256 * KB, (1, 16, 128, 512)),
    (4 * MB, (1, 8, 64)),
)
TARGET = 0.85  # of raw NIXL, from TARGET_BYTES a block on
TARGET_BYTES = 256 * KB
LARGE_BYTES = 32 * MB  # a pull; of less, the ways to the transport's thread and back are a part
TIMEOUT = 60.0

Indices = np.ndarray[Any, np.dtype[np.int32]]
Move = Callable[[Indices, Indices], None]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one size and number of blocks; a ratio above 1 is faster than the other."""

    block_bytes: int
    blocks: int
    pull_us: float
    gb_per_second: float
    raw_gb_per_second: float
    memcpy_gb_per_second: float
    to_raw: float
    to_memcpy: float


def main() -> int:
    """Run the benchmark; returns 1 if a pull was wrong or too slow."""
    options = _options()
    if options.hold:
        *layout, tickets = options.hold
        uvloop.run(_hold(options.transport, PoolLayout(*layout), tickets))
        return 0
    rows = uvloop.run(_measure(options))
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, {options.transport}\n")
    print(_table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    large = [
        row
        for row in rows
        if row.block_bytes >= TARGET_BYTES and row.block_bytes * row.blocks >= LARGE_BYTES
    ]
    least = min(row.to_raw for row in large)
    print(
        f"\npulls of 32 MB and more in blocks of 256 KB and more: {least:.0%} of raw NIXL at least"
    )
    return 0 if least >= TARGET else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--transport", choices=BACKENDS, default="nixl")
    parser.add_argument("--rounds", type=int, default=15, help="of each measurement")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--hold", type=int, nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


async def _hold(backend: str, layout: PoolLayout, tickets: int) -> None:
    """Be the holder: say where the pool is, and offer it under many tickets."""
    pool = open_host_pool(
        backend, layout, epoch=uuid.uuid4().hex, clock=SystemClock(), on_pulled=lambda _: None
    )
    raw = None if backend == "nixl" else _second(pool.memory, layout)
    np.frombuffer(pool.memory, np.uint8).reshape(layout.total_blocks, -1)[:] = _pattern(layout)
    offers = [pool.transport.offer(f"t{number}") for number in range(tickets)]
    site = offers[0] if raw is None else raw.site
    print("pools", *(each.hex() for each in (site, *offers)), flush=True)
    while raw is not None:
        raw.agent.get_new_notifs()
        await asyncio.sleep(0.001)
    await asyncio.Event().wait()


async def _measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for size, counts in SHAPES:
        layout = PoolLayout(max(counts), size)
        tickets = (options.rounds + 1) * len(counts)
        with _holder(options.transport, layout, tickets) as (site, offers):
            pool = open_host_pool(
                options.transport,
                layout,
                epoch=uuid.uuid4().hex,
                clock=SystemClock(),
                on_pulled=lambda _: None,
            )
            np.frombuffer(pool.memory, np.uint8).fill(0)  # so that no pull waits for pages
            raw = _Raw(np.full(layout.size, 0, np.uint8), layout, f"raw-{uuid.uuid4().hex}")
            raw.meet(site)
            for count in counts:
                rows.append(await _compare(options.rounds, count, (pool.transport, offers), raw))
                print(_table(rows[-1:]).splitlines()[-1], flush=True)
            ours = np.frombuffer(pool.memory, np.uint8).reshape(layout.total_blocks, -1)
            if not (ours == _pattern(layout)).all():
                raise SystemExit("a pull brought the wrong bytes")
            del ours
            raw.close()
            await pool.transport.aclose()
    return rows


async def _compare(
    rounds: int, count: int, source: tuple[KvTransport, Iterator[bytes]], raw: "_Raw"
) -> Row:
    transport, offers = source
    layout, rng = raw.layout, np.random.default_rng(0)
    theirs = np.ones((layout.total_blocks, layout.block_bytes), np.uint8)
    copied = np.full_like(theirs, 0)
    times: dict[str, list[float]] = {"pull": [], "raw": [], "memcpy": []}
    for turn in range(rounds + 1):
        blocks = rng.permutation(layout.total_blocks)[:count].astype(np.int32)
        remote = blocks.tolist()
        started = time.perf_counter()
        await transport.pull(next(offers), remote, remote, timeout=TIMEOUT)
        took = {"pull": time.perf_counter() - started}
        took["raw"] = _timed(raw.read, blocks)
        took["memcpy"] = _timed(lambda indices: _copy(theirs, copied, indices), blocks)
        for name, seconds in took.items() if turn else ():  # the first touches the memory
            times[name].append(seconds)
    pull, bare, memcpy = (statistics.median(times[name]) for name in ("pull", "raw", "memcpy"))
    moved = count * layout.block_bytes / 1e9
    return Row(
        layout.block_bytes,
        count,
        pull * 1e6,
        moved / pull,
        moved / bare,
        moved / memcpy,
        _ratio(times["raw"], times["pull"]),
        _ratio(times["memcpy"], times["pull"]),
    )


def _ratio(one: list[float], other: list[float]) -> float:
    """Compare turn by turn: what else the machine does changes slowly."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _timed(move: Callable[[Indices], None], blocks: Indices) -> float:
    started = time.perf_counter()
    move(blocks)
    return time.perf_counter() - started


def _copy(source: Any, target: Any, blocks: Indices) -> None:
    for block in blocks:
        target[block] = source[block]


def _pattern(layout: PoolLayout) -> Any:
    return (np.arange(layout.total_blocks) % 251 + 1).astype(np.uint8)[:, None]


class _Raw:
    """A bare NIXL agent over some memory."""

    def __init__(self, memory: Any, layout: PoolLayout, name: str) -> None:
        api = load()
        self.layout = layout
        self.memory = memory
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent = api.nixl_agent(name, config)
        address = memory.ctypes.data
        self._registered = self.agent.register_memory([(address, layout.size, 0, "")], "DRAM")
        self.site = Site(name, Region(layout, address), 0, self.agent.get_agent_metadata()).offer(0)
        self._ours = self._descriptors("NIXL_INIT_AGENT", address)

    def meet(self, site: bytes) -> None:
        """Prepare to read from a peer."""
        peer, _ = parse_offer(site)
        self._name = self.agent.add_remote_agent(peer.metadata)
        self._theirs = self._descriptors(self._name, peer.region.address)

    def read(self, blocks: Indices) -> None:
        """Read blocks of the peer into the same ones here."""
        handle = self.agent.make_prepped_xfer("READ", self._ours, blocks, self._theirs, blocks)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise SystemExit("a raw read failed")

    def close(self) -> None:
        """End the agent."""
        self._theirs.release()
        self._ours.release()
        self.agent.remove_remote_agent(self._name)
        self.agent.deregister_memory(self._registered)

    def _descriptors(self, name: str, address: int) -> Any:
        size, count = self.layout.block_bytes, self.layout.total_blocks
        each = [[address + block * size, size, 0] for block in range(count)]
        return self.agent.prep_xfer_dlist(name, np.array(each, np.uint64), "DRAM")


def _second(memory: memoryview, layout: PoolLayout) -> _Raw:
    """Return a bare agent over a pool that has a transport of another kind."""
    return _Raw(np.frombuffer(memory, np.uint8), layout, f"raw-{uuid.uuid4().hex}")


@contextmanager
def _holder(
    backend: str, layout: PoolLayout, tickets: int
) -> Iterator[tuple[bytes, Iterator[bytes]]]:
    """Run a holder; yield where its pool is for bare NIXL, and offers of its transport."""
    numbers = [str(number) for number in (layout.total_blocks, layout.block_bytes, tickets)]
    command = [sys.executable, "-m", "bench.kv", "--transport", backend, "--hold", *numbers]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("pools "))
        site, *offers = (bytes.fromhex(word) for word in line.split()[1:])
        yield site, iter(offers)
    finally:
        process.kill()
        process.wait()


def _table(rows: list[Row]) -> str:
    head = f"{'block':>8} {'count':>6} {'us':>9} {'GB/s':>7} {'raw':>7} {'memcpy':>7}"
    lines = [f"{head} {'to raw':>7} {'to memcpy':>10}"]
    lines += [
        f"{row.block_bytes // KB:>5} KB {row.blocks:>6} {row.pull_us:>9.0f} "
        f"{row.gb_per_second:>7.2f} {row.raw_gb_per_second:>7.2f} "
        f"{row.memcpy_gb_per_second:>7.2f} {row.to_raw:>7.0%} {row.to_memcpy:>10.0%}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
