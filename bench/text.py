"""What text costs: CPU time per output token of the processes that make tokens into answers.

    python -m bench.text [--against CHECKOUT] [--rounds N] [--json FILE]

Streams chat completions through a mesh on the simulated engine at full speed, and reads the CPU
time of its tokenizer (detokenizing, stop strings) and of its frontend (pipeline, SSE): plain,
with stop strings that never match, and with log probabilities. With `--against`, a second mesh
runs from another checkout of this repository, in the same virtual environment; the two take
turns, and the ratio of each turn is what counts: above 1 is dearer than the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import Load, run

ISL, OSL, CONCURRENCY = 50, 256, 16
ROLES = ("tokenizer", "frontend")
TICKS = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).resolve().parent.parent

CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "stops": {"stop": ["\n\nUser:", "</s>", "<|eot|>", "Observation:"]},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}


@dataclass(frozen=True, slots=True)
class Mesh:
    """A running mesh: its port, its model, and the processes to watch by role."""

    port: int
    model: str
    pids: Mapping[str, int]

    def cost(self, requests: int, seed: int, more: Mapping[str, Any]) -> dict[str, float] | None:
        """Run a load; return CPU microseconds per token by role, None if it was refused."""
        before = {role: _cpu_seconds(pid) for role, pid in self.pids.items()}
        load = Load("127.0.0.1", self.port, self.model, CONCURRENCY, requests, ISL, OSL, seed, more)
        measured = run(load)
        if measured.errors:
            return None
        return {
            role: (_cpu_seconds(pid) - before[role]) / measured.tokens * 1e6
            for role, pid in self.pids.items()
        }


def main() -> int:
    """Run the benchmark; returns 1 if text has become dearer than the target allows."""
    options = _options()
    with ExitStack() as stack:
        meshes = [stack.enter_context(_mesh(HERE, 8178))]
        if options.against:
            meshes.append(stack.enter_context(_mesh(options.against.resolve(), 8179)))
        for mesh in meshes:
            mesh.cost(2 * CONCURRENCY, 0, {})  # warm up
        results = {name: _compare(meshes, options, more) for name, more in CASES.items()}
    print(_table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    ratios = [row["ratio"] for row in results.values() if "ratio" in row]
    return 1 if any(ratio > options.target for ratio in ratios) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each measurement")
    parser.add_argument("--requests", type=int, default=160, help="requests of one turn")
    parser.add_argument("--target", type=float, default=1.1, help="largest ratio allowed")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser.parse_args()


def _compare(
    meshes: list[Mesh], options: argparse.Namespace, more: Mapping[str, Any]
) -> dict[str, float]:
    """Return the medians of this checkout, and of the turns' ratios to the other one."""
    turns = []
    for turn in range(options.rounds):
        # Each has the first go in every other turn: what else the machine does changes slowly.
        order = meshes if turn % 2 else meshes[::-1]
        costs = {mesh.port: mesh.cost(options.requests, turn + 1, more) for mesh in order}
        turns.append([costs[mesh.port] for mesh in meshes])
    ours = [costs[0] for costs in turns if costs[0] is not None]
    row = {role: statistics.median(cost[role] for cost in ours) for role in ROLES}
    pairs = [(c[0], c[1]) for c in turns if len(c) == 2 and c[0] is not None and c[1] is not None]
    if pairs:
        ratios = [sum(one.values()) / sum(other.values()) for one, other in pairs]
        row["ratio"] = statistics.median(ratios)
        for role in ROLES:
            row[f"{role}_ratio"] = statistics.median(
                one[role] / other[role] for one, other in pairs
            )
    return row


def _table(results: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        "| | tokenizer us/token | frontend us/token | to the other: both | tokenizer | frontend |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        ratios = [row.get(key) for key in ("ratio", "tokenizer_ratio", "frontend_ratio")]
        cells = [f"{row['tokenizer']:.1f}", f"{row['frontend']:.1f}"]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@contextmanager
def _mesh(checkout: Path, port: int) -> Iterator[Mesh]:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            settings = ["engine.sim.latency.speed=0", "engine.sim.total_blocks=65536"]
            flags = [flag for setting in settings for flag in ("--set", setting)]
            ports = ["--http-port", str(port), "--grpc-port", str(port + 1000)]
            sizes = ["--prefill", "0", "--decode", "1"]
            up = ["--detach", "--no-chat", "--engine", "sim", *sizes, *ports, *flags]
            _kvmesh(checkout, scratch, "up", *up)
            listed = json.loads(_kvmesh(checkout, scratch, "status", "--json"))["processes"]
            pids = {each["role"]: each["pid"] for each in listed if each["role"] in ROLES}
            model = next(each["model"] for each in listed if each["role"] == "decode")
            yield Mesh(port, model, pids)
        finally:
            _kvmesh(checkout, scratch, "down")


def _kvmesh(checkout: Path, state: str, command: str, *arguments: str) -> str:
    line = [sys.executable, "-m", "kvmesh.cli", command, "--state-dir", state, *arguments]
    done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout)
    return done.stdout


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    raise SystemExit(main())
