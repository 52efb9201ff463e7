"""The torch engine's prompt logprobs are those of transformers' own forward pass."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.engine.base import EngineRequest
from kvmesh.engine.batch_engine import BatchEngine
from kvmesh.engine.torch import TorchConfig, TorchSequence
from kvmesh.engine.torch.plan import SCORED_ROWS
from kvmesh.testing.engine import Started, started
from kvmesh.testing.engine_torch import CONFIG, tiny_llama, torch_engine
from kvmesh.types import Sampling, TokenLogprob

VOCAB = 259
TOP = 3

_ids = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


class Reference:
    """transformers itself: one forward pass over the whole prompt."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM  # noqa: PLC0415 - loads for seconds

        self._model = LlamaForCausalLM.from_pretrained(folder).eval()

    def check(self, prompt: Sequence[int], rows: Sequence[TokenLogprob]) -> None:
        import torch  # noqa: PLC0415 - loads for seconds

        with torch.inference_mode():
            logits = self._model(torch.tensor([list(prompt)])).logits[0]
        expected = torch.log_softmax(logits, -1)
        assert len(rows) == len(prompt) - 1
        for at, row in enumerate(rows):
            assert row.logprob == pytest.approx(float(expected[at, prompt[at + 1]]), abs=1e-3)
            top = expected[at].topk(TOP)
            assert [token for token, _ in row.top] == top.indices.tolist()
            assert [value for _, value in row.top] == pytest.approx(top.values.tolist(), abs=1e-3)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def ask(prompt: Sequence[int], count: int = 4, **sampling: Any) -> EngineRequest:
    knobs: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest(f"request-{next(_ids)}", prompt, Sampling(count, **knobs))


async def scored(
    engine: BatchEngine[TorchSequence], prompt: Sequence[int], count: int = 4
) -> Sequence[TokenLogprob]:
    """Return the prompt's rows; they come once, before or with the first token."""
    found, tokens = [], 0
    async for step in engine.generate(ask(prompt, count, prompt_logprobs=TOP)):
        if step.prompt_logprobs is not None:
            assert not tokens
            found.append(step.prompt_logprobs)
        tokens += len(step.token_ids)
    assert tokens == count
    (rows,) = found
    return rows


async def ended(engine: BatchEngine[TorchSequence], request: EngineRequest) -> None:
    async for step in engine.generate(request):
        assert step.prompt_logprobs is None


def opened(folder: Path, **changes: Any) -> tuple[Any, AbstractAsyncContextManager[Started]]:
    config: TorchConfig = replace(CONFIG, **changes)
    engine = torch_engine(folder, config)
    return engine, started(engine)


@pytest.mark.parametrize("budget", [1, 7, 64, 1024])
@pytest.mark.parametrize("workspace_mb", [0, 64])
async def test_chunks_of_any_size(
    folder: Path, reference: Reference, budget: int, workspace_mb: int
) -> None:
    engine, life = opened(folder, max_batch_tokens=budget, workspace_mb=workspace_mb)
    async with life:
        for length in (1, 2, 8, 9, 61):
            prompt = words(length, length)
            reference.check(prompt, await scored(engine, prompt))


@pytest.mark.parametrize("shared", [0, 3, 8, 20, 33, 40])
async def test_prefix_hits(folder: Path, reference: Reference, shared: int) -> None:
    engine, life = opened(folder, block_size=8)
    async with life:
        await ended(engine, ask(words(40, 1)))
        prompt = words(shared, 1) + words(41 - shared, 2)
        reference.check(prompt, await scored(engine, prompt))
        cached = len(engine.snapshot())
        reference.check(prompt, await scored(engine, prompt))
        assert len(engine.snapshot()) == cached  # it stored what it computed, once


async def test_batches_with_others(folder: Path, reference: Reference) -> None:
    engine, life = opened(folder, max_batch_tokens=20)
    async with life:
        prompts = [words(length, length) for length in (50, 3, 27, 1)]
        rows, _ = await asyncio.gather(
            asyncio.gather(*(scored(engine, prompt) for prompt in prompts)),
            asyncio.gather(*(ended(engine, ask(words(30, seed), 20)) for seed in range(4))),
        )
        for prompt, own in zip(prompts, rows, strict=True):
            reference.check(prompt, own)


async def test_preemption(folder: Path, reference: Reference) -> None:
    """The pool holds 256 tokens, and prompts are computed by 16: they lose their blocks midway."""
    engine, life = opened(folder, kv_cache_mb=0.125, max_batch_tokens=16)
    async with life:
        prompts = [words(80, seed) for seed in range(6)]
        rows = await asyncio.gather(*(scored(engine, prompt, 40) for prompt in prompts))
        assert engine.preemptions
        for prompt, own in zip(prompts, rows, strict=True):
            reference.check(prompt, own)


@pytest.fixture
def rows_a_step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many rows of logits each step scores, as they come."""
    from kvmesh.engine.torch import runner  # noqa: PLC0415 - loads torch

    seen: list[int] = []
    real = runner.score

    def score(logits: Any, spans: Any) -> Any:
        seen.append(len(logits))
        return real(logits, spans)

    monkeypatch.setattr(runner, "score", score)
    return seen


async def test_the_rows_of_logits_in_memory_are_bounded(
    folder: Path, reference: Reference, rows_a_step: list[int]
) -> None:
    engine, life = opened(folder, max_batch_tokens=4096, kv_cache_mb=2)
    async with life:
        prompts = [words(700, 1), words(300, 2), words(20, 3)]
        rows, _ = await asyncio.gather(
            asyncio.gather(*(scored(engine, prompt) for prompt in prompts)),
            ended(engine, ask(words(800, 4))),
        )
    for prompt, own in zip(prompts, rows, strict=True):
        reference.check(prompt, own)
    assert max(rows_a_step) == SCORED_ROWS
    assert sum(rows_a_step) == 700 + 300 + 20 - 3


async def test_who_does_not_ask_costs_no_logits(folder: Path, rows_a_step: list[int]) -> None:
    engine, life = opened(folder)
    async with life:
        await ended(engine, ask(words(100), logprobs=2))
    assert set(rows_a_step) == {0}
