"""How fast the torch engine is, beside transformers' generate() and vLLM on the same cores.

Each runs in a process of its own and is asked in turn, so that what else the machine does
hits all of them. Reported are each one's best round, and its ratio to the torch engine's, the
median of all rounds.

    python -m bench.engine [--model FOLDER]
"""

import argparse
import asyncio
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from kvmesh.clock import SystemClock
from kvmesh.config import environment
from kvmesh.engine.base import AsyncEngine, EngineRequest, Seat
from kvmesh.engine.factory import EngineConfig, create
from kvmesh.engine.torch.config import TorchConfig
from kvmesh.engine.vllm.settings import VllmConfig
from kvmesh.models import SMOLLM2, default_cache, read_info, resolve
from kvmesh.types import Role, Sampling

OURS = "torch"
Results = Mapping[str, Mapping[str, Sequence[float]]]
"""Seconds of each round, by contestant and task."""

PROMPT = 128  # tokens before decoding is timed
CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What is compared. `threads` are each contestant's."""

    model: Path
    dtype: str
    threads: int
    tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Task:
    """Time `streams` prompts of `prompt` random tokens, and `tokens` more of each."""

    name: str
    streams: int
    prompt: int
    tokens: int
    seed: int


class Contestant(Protocol):
    """Something that continues prompts."""

    def time(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """Return seconds until each prompt has its first token, and then per further token."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class EngineContestant:
    """An engine of the mesh."""

    def __init__(self, name: str, settings: Settings) -> None:
        config = EngineConfig(
            name=name,
            torch=TorchConfig(
                dtype=settings.dtype, threads=settings.threads, context_length=CONTEXT
            ),
            vllm=VllmConfig(dtype=settings.dtype, threads=settings.threads, max_model_len=CONTEXT),
        )
        seat = Seat("bench", uuid.uuid4().hex, Role.DECODE, settings.model, "bench")
        self._ids = itertools.count()
        self._runner = asyncio.Runner()
        self._engine: AsyncEngine = create(config, seat, clock=SystemClock(), rng=random.Random(0))
        self._runner.run(self._engine.start())

    def time(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """Time them all at once."""
        begin = time.perf_counter()
        times = self._runner.run(self._all(prompts, tokens))
        first = max(stream[0] for stream in times)
        last = max(stream[-1] for stream in times)
        return first - begin, (last - first) / max(1, tokens - 1)

    def close(self) -> None:
        """Close the engine."""
        self._runner.run(self._engine.aclose())
        self._runner.close()

    async def _all(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        return await asyncio.gather(*(self._one(prompt, tokens) for prompt in prompts))

    async def _one(self, prompt: Sequence[int], tokens: int) -> list[float]:
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = EngineRequest(f"bench-{next(self._ids)}", prompt, sampling)
        times = []
        async for step in self._engine.generate(request):
            times += [time.perf_counter()] * len(step.token_ids)
        return times


class GenerateContestant:
    """transformers' generate() on one batch."""

    def __init__(self, settings: Settings) -> None:
        import torch  # noqa: PLC0415 - in its own process only
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        torch.set_num_threads(settings.threads)
        self._torch = torch
        dtype = torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()

    def time(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """Time one batch."""
        ids = self._torch.tensor([list(prompt) for prompt in prompts])
        times: list[float] = []

        def note(*_: Any, **__: Any) -> Any:
            times.append(time.perf_counter())
            return self._torch.zeros(len(prompts), dtype=self._torch.bool)

        begin = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[note],
            )
        return times[0] - begin, (times[-1] - times[0]) / max(1, tokens - 1)

    def close(self) -> None:
        """Do nothing: the process ends."""


CONTESTANTS: Mapping[str, Callable[[Settings], Contestant]] = {
    OURS: functools.partial(EngineContestant, "torch"),
    "generate": GenerateContestant,
    "vllm": functools.partial(EngineContestant, "vllm"),
}


def serve(name: str, settings: Settings, pipe: Connection) -> None:
    """Answer tasks until told to stop, with (first, further) in seconds. A process's whole life."""
    begin = time.perf_counter()
    # The torch engine asks for it; the others get it so that the code is compared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 - for OpenMP
    contestant = CONTESTANTS[name](settings)
    pipe.send(time.perf_counter() - begin)
    vocab_size = read_info(settings.model).vocab_size
    while (task := pipe.recv()) is not None:
        rng = random.Random(task.seed)
        prompts = [
            [rng.randrange(vocab_size) for _ in range(task.prompt)] for _ in range(task.streams)
        ]
        pipe.send(contestant.time(prompts, task.tokens))
    contestant.close()


def tasks(settings: Settings) -> list[Task]:
    """Return one round; prompts never repeat."""
    seeds = random.Random(uuid.uuid4().int)
    shapes = [
        ("TTFT, 128 tokens", 1, 128, 1),
        ("TTFT, 512 tokens", 1, 512, 1),
        ("per token, 1 stream", 1, PROMPT, settings.tokens),
        ("per token, 8 streams", 8, PROMPT, settings.tokens),
    ]
    return [Task(*shape, seeds.getrandbits(32)) for shape in shapes]


def compare(settings: Settings, names: Sequence[str]) -> Results:
    """Run all rounds; the start is a task too, of one round."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    results: dict[str, dict[str, list[float]]] = {}
    for name in names:  # one after the other: each start has the machine for itself
        pipes[name], far = context.Pipe()
        context.Process(target=serve, args=(name, settings, far)).start()
        results[name] = {"start": [pipes[name].recv()]}
    for number in range(settings.rounds + 1):
        for task in tasks(settings):
            for name in names:
                pipes[name].send(task)
                taken = pipes[name].recv()[0 if task.tokens == 1 else 1]
                if number:  # the first round warms up
                    results[name].setdefault(task.name, []).append(taken)
    for pipe in pipes.values():
        pipe.send(None)
    return results


def report(results: Results) -> str:
    """Return a table: the best milliseconds, and the median of how many times ours it took."""
    lines = ["".join([f"{'ms':24}", *(f"{name:>20}" for name in results)])]
    for task, ours in results[OURS].items():
        cells = []
        for contestant in results.values():
            pairs = zip(contestant[task], ours, strict=True)
            ratio = statistics.median(taken / base for taken, base in pairs)
            cells.append(f"{min(contestant[task]) * 1e3:.1f} ({ratio:.2f})")
        lines.append("".join([f"{task:24}", *(f"{cell:>20}" for cell in cells)]))
    return "\n".join(lines)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2, help="a model folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=33, help="tokens per stream when decoding")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], choices=sorted(CONTESTANTS))
    parser.add_argument("--json", type=Path, help="write the seconds there")
    arguments = parser.parse_args()
    model = resolve(arguments.model, default_cache(environment()), lambda *_: None)
    settings = Settings(
        model, arguments.dtype, arguments.threads, arguments.tokens, arguments.rounds
    )
    absent = set(arguments.without) - {OURS}
    if importlib.util.find_spec("vllm") is None:
        absent.add("vllm")
    results = compare(settings, [name for name in CONTESTANTS if name not in absent])
    print(report(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
