"""The whole mesh over HTTP, on the simulated engine at full speed: what the mesh itself costs.

    python -m bench.e2e [--model FOLDER] [--prefill N] [--json FILE]

Starts a mesh, loads it with streamed chat completions, and prints requests and tokens per
second, TTFT and ITL, and for each process its CPU time per output token and its memory.
The load generator shares the machine with the mesh.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import Load, Measured, run

ISL = 200
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Run the benchmark; returns 1 if any request failed."""
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch)
        try:
            _kvmesh(state, "up", "--detach", "--no-chat", *_up(options))
            results = _measure(state, options)
        finally:
            _kvmesh(state, "down")
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
    print(_table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 1 if any(row["errors"] for row in results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="folder whose tokenizer to use; default: the up command's")
    parser.add_argument("--prefill", type=int, default=0, help="prefill workers (default 0)")
    parser.add_argument("--decode", type=int, default=1, help="decode workers (default 1)")
    parser.add_argument("--osl", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=6.0, help="rough length of each run")
    parser.add_argument("--set", action="append", default=[], help="further settings for `up`")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser.parse_args()


def _up(options: argparse.Namespace) -> list[str]:
    settings = ["engine.sim.latency.speed=0", "engine.sim.total_blocks=65536", *options.set]
    model = ["--model", options.model] if options.model else []
    sizes = ["--prefill", str(options.prefill), "--decode", str(options.decode)]
    ports = ["--http-port", "8177", "--grpc-port", "9177"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    return ["--engine", "sim", *model, *sizes, *ports, *flags]


def _measure(state: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    processes = json.loads(_kvmesh(state, "status", "--json"))["processes"]
    workers = [p for p in processes if p["role"] == "decode"]
    model = workers[0]["model"]
    _load(model, 16, 64, 8, 0)  # warm up
    results = []
    for osl in options.osl:
        for concurrency in options.concurrency:
            # Prompts differ from run to run, or the prefix cache would answer for prefill.
            seed = 2 * (1000 * osl + concurrency)
            probe = _load(model, concurrency, 2 * concurrency, osl, seed)
            rate = 2 * concurrency / probe.seconds
            requests = max(2 * concurrency, int(rate * options.seconds))
            before = [_usage(p["pid"]) for p in processes]
            measured = _load(model, concurrency, requests, osl, seed + 1)
            after = [_usage(p["pid"]) for p in processes]
            rows = list(zip(processes, before, after, strict=True))
            results.append(_row(measured, osl, concurrency, rows))
            print(_table(results[-1:]).splitlines()[-1], flush=True)
    return results


def _load(model: str, concurrency: int, requests: int, osl: int, seed: int) -> Measured:
    return run(Load("127.0.0.1", 8177, model, concurrency, requests, ISL, osl, seed))


@dataclass(frozen=True, slots=True)
class _Usage:
    cpu_seconds: float
    rss_bytes: int


def _usage(pid: int) -> _Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return _Usage((int(fields[11]) + int(fields[12])) / TICKS, pages * PAGE)


def _row(measured: Measured, osl: int, concurrency: int, rows: list[Any]) -> dict[str, Any]:
    tokens = max(1, measured.tokens)
    return {
        "osl": osl,
        "concurrency": concurrency,
        "requests": len(measured.e2e),
        "errors": measured.errors,
        "requests_per_s": len(measured.e2e) / measured.seconds,
        "tokens_per_s": measured.tokens / measured.seconds,
        "ttft_ms": _percentiles(measured.ttft),
        "itl_ms": _percentiles(measured.itl),
        "cpu_us_per_token": {
            p["role"]: (after.cpu_seconds - before.cpu_seconds) / tokens * 1e6
            for p, before, after in rows
        },
        "rss_mb": {p["role"]: after.rss_bytes / 1e6 for p, _, after in rows},
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return dict.fromkeys(("p50", "p90", "p99"), float("nan"))
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {name: cuts[n - 1] * 1e3 for name, n in (("p50", 50), ("p90", 90), ("p99", 99))}


def _table(results: list[dict[str, Any]]) -> str:
    roles = list(results[0]["cpu_us_per_token"])
    head = ["OSL", "conc", "req/s", "tok/s", "TTFT p50/p90/p99 ms", "ITL p50/p99 ms"]
    head += [*(f"{role} us/tok" for role in roles), "RSS MB", "errors"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        ttft, itl = row["ttft_ms"], row["itl_ms"]
        cells = [
            str(row["osl"]),
            str(row["concurrency"]),
            f"{row['requests_per_s']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{ttft['p50']:.1f} / {ttft['p90']:.1f} / {ttft['p99']:.1f}",
            f"{itl['p50']:.2f} / {itl['p99']:.2f}",
            *(f"{row['cpu_us_per_token'][role]:.1f}" for role in roles),
            " ".join(f"{row['rss_mb'][role]:.0f}" for role in roles),
            str(row["errors"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _kvmesh(state: Path, command: str, *arguments: str) -> str:
    line = [sys.executable, "-m", "kvmesh.cli", command, "--state-dir", str(state), *arguments]
    return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
