"""The torch engine gives token by token what transformers' generate() gives."""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.base import EngineRequest, Finish, Prefilled
from kvmesh.engine.batch_engine import BatchEngine
from kvmesh.engine.torch import TorchConfig, TorchSequence
from kvmesh.errors import EngineError, TicketError
from kvmesh.kv.blocks import block_hashes
from kvmesh.testing.engine_torch import CONFIG, CONTEXT_LENGTH, tiny_llama, torch_engine
from kvmesh.types import FinishReason, Sampling

Engine = BatchEngine[TorchSequence]

VOCAB = 259
EOS = 2
LONGEST = 96  # tokens of a random prompt
NEW = 12

_ids = itertools.count()

CONFIGS = {
    "plain": CONFIG,
    "chunks": replace(CONFIG, max_batch_tokens=7),
    "no workspace": replace(CONFIG, workspace_mb=0),
    "workspace too small for all": replace(CONFIG, workspace_mb=1),
    "blocks of one": replace(CONFIG, block_size=1),
    "large blocks": replace(CONFIG, block_size=32),
    "few at once": replace(CONFIG, max_batch=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


class Reference:
    """transformers itself, one request at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM  # noqa: PLC0415 - loads for seconds

        self._model = LlamaForCausalLM.from_pretrained(folder).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: Sequence[int], count: int = NEW, **options: Any) -> list[int]:
        import torch  # noqa: PLC0415 - loads for seconds

        key = (*prompt, -count)
        if options or key not in self._known:
            with torch.inference_mode():
                output = self._model.generate(
                    torch.tensor([list(prompt)]),
                    max_new_tokens=count,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    **options,
                )
            tokens = output[0, len(prompt) :].tolist()
            if options:
                return cast(list[int], tokens)
            self._known[key] = tokens
        return self._known[key]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


class Bench:
    """Engines in a loop of their own, so that hypothesis can use them again and again."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self._folder = folder
        self._runner = runner
        self._engines: list[Engine] = []

    def engine(self, config: TorchConfig = CONFIG, seed: int = 0) -> Engine:
        engine = torch_engine(self._folder, config, rng=random.Random(seed))
        self._runner.run(engine.start())
        self._engines.append(engine)
        return engine

    def pair(self, config: TorchConfig = CONFIG) -> tuple[Engine, Engine]:
        return self.engine(config, 1), self.engine(config, 2)

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def close(self) -> None:
        for engine in self._engines:
            self._runner.run(engine.aclose())


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        made = Bench(folder, runner)
        yield made
        made.close()


def ask(prompt: Sequence[int], count: int = NEW, **sampling: Any) -> EngineRequest:
    knobs: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest(f"request-{next(_ids)}", prompt, Sampling(count, **knobs))


async def collect(steps: Any) -> tuple[list[int], Finish]:
    tokens: list[int] = []
    finish = None
    async for step in steps:
        tokens += step.token_ids
        finish = step.finish
    assert finish is not None
    return tokens, finish


async def generate(engine: Engine, *requests: EngineRequest) -> list[list[int]]:
    done = await asyncio.gather(*(collect(engine.generate(request)) for request in requests))
    return [tokens for tokens, _ in done]


async def hand_off(prefill: Engine, decode: Engine, request: EngineRequest) -> list[int]:
    prefilled: Prefilled = await prefill.prefill(request)
    first = list(prefilled.first_token_ids)
    if prefilled.ticket is None:
        return first
    again = replace(request, request_id=request.request_id + "-d")
    rest, _ = await collect(decode.resume(again, prefilled.ticket))
    return first + rest


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def prompts(least: int = 1, most: int = 6) -> st.SearchStrategy[list[list[int]]]:
    """Prompts that share prefixes of any length with one of two texts."""
    one = st.builds(
        lambda text, shared, own, seed: words(shared, 100 + text) + words(own, seed),
        st.integers(1, 2), st.integers(0, LONGEST // 2), st.integers(1, LONGEST // 2),
        st.integers(0, 3),
    )  # fmt: skip
    return st.lists(one, min_size=least, max_size=most)


def check_idle(engine: Engine) -> None:
    load = engine.load()
    assert (load.running, load.waiting, load.used_blocks, load.ticket_blocks) == (0, 0, 0, 0)


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request: pytest.FixtureRequest, bench: Bench) -> Engine:
    return bench.engine(CONFIGS[request.param])


@pytest.fixture(scope="module")
def slow_pair(bench: Bench) -> tuple[Engine, Engine]:
    return bench.pair(replace(CONFIG, max_batch_tokens=20))


@pytest.fixture(scope="module")
def pair(bench: Bench) -> tuple[Engine, Engine]:
    return bench.pair()


@pytest.fixture(scope="module")
def chunking(bench: Bench) -> Engine:
    return bench.engine(replace(CONFIG, max_batch_tokens=16))


class TestExactness:
    @settings(max_examples=15, deadline=None)
    @given(batch=prompts())
    def test_batches(
        self, bench: Bench, reference: Reference, engine: Engine, batch: list[list[int]]
    ) -> None:
        answers = bench.run(generate(engine, *map(ask, batch)))
        assert answers == [reference(prompt) for prompt in batch]
        check_idle(engine)

    @settings(max_examples=15, deadline=None)
    @given(batch=prompts(most=4))
    def test_remote_prefill(
        self, bench: Bench, reference: Reference, slow_pair: tuple[Engine, Engine],
        batch: list[list[int]],
    ) -> None:  # fmt: skip
        async def all_at_once() -> list[list[int]]:
            return await asyncio.gather(*(hand_off(*slow_pair, ask(prompt)) for prompt in batch))

        assert bench.run(all_at_once()) == [reference(prompt) for prompt in batch]
        for engine in slow_pair:
            check_idle(engine)


@pytest.mark.parametrize("shared", range(0, 34))
def test_prefix_hits_of_every_length(bench: Bench, reference: Reference, shared: int) -> None:
    engine = bench.engine(replace(CONFIG, block_size=8, kv_cache_mb=1))
    first, second = words(33, 1), words(shared, 1) + words(5, 2)
    assert bench.run(generate(engine, ask(first))) == [reference(first)]
    assert bench.run(generate(engine, ask(second))) == [reference(second)]


def test_a_prefix_is_taken_from_the_cache(bench: Bench) -> None:
    engine = bench.engine()
    bench.run(generate(engine, ask(words(33))))
    _, finish = bench.run(collect(engine.generate(ask(words(33)))))
    assert finish.cached_tokens == 32


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_every_full_block_is_cached(bench: Bench, budget: int) -> None:
    engine = bench.engine(replace(CONFIG, max_batch_tokens=budget))
    prompt = words(21)
    [tokens] = bench.run(generate(engine, ask(prompt, 9)))
    computed = [*prompt, *tokens[:-1]]  # the last one picked needs no KV
    assert engine.snapshot() == block_hashes(computed, CONFIG.block_size, "tiny")


@settings(max_examples=4, deadline=None)
@given(batch=prompts(4, 8), seed=st.integers(0, 1 << 20))
def test_preemption_changes_nothing(
    bench: Bench, reference: Reference, crowded: Engine, batch: list[list[int]], seed: int
) -> None:
    requests = [ask(prompt, 24, seed=seed, temperature=0.5) for prompt in batch]
    alone = [bench.run(generate(crowded, request))[0] for request in requests]
    greedy = bench.run(generate(crowded, *(ask(prompt, 24) for prompt in batch)))
    assert greedy == [reference(prompt, 24) for prompt in batch]
    assert bench.run(generate(crowded, *requests)) == alone
    check_idle(crowded)


@pytest.fixture(scope="module")
def crowded(bench: Bench) -> Engine:
    """An engine whose pool holds 256 tokens: not two of the longest requests."""
    return bench.engine(replace(CONFIG, block_size=4, kv_cache_mb=0.125))


def test_the_engine_above_does_preempt(bench: Bench, crowded: Engine) -> None:
    before = crowded.preemptions
    bench.run(generate(crowded, *(ask(words(40, seed), 40) for seed in range(5))))
    assert crowded.preemptions > before


def test_priority_goes_first(bench: Bench) -> None:
    engine = bench.engine(replace(CONFIG, max_batch=1))
    ended: list[int] = []

    async def one(priority: int) -> None:
        await collect(engine.generate(replace(ask(words(5)), priority=priority)))
        ended.append(priority)

    async def all_at_once() -> None:
        await asyncio.gather(*(one(priority) for priority in (3, 1, 2)))

    bench.run(all_at_once())
    assert ended == [1, 2, 3]


class TestCancelling:
    @settings(max_examples=15, deadline=None)
    @given(batch=prompts(2, 6), after=st.lists(st.integers(0, 10), min_size=6, max_size=6))
    def test_at_any_point_disturbs_nobody(
        self, bench: Bench, reference: Reference, chunking: Engine,
        batch: list[list[int]], after: list[int],
    ) -> None:  # fmt: skip
        async def leave(prompt: Sequence[int], tokens: int) -> None:
            async with aclosing(chunking.generate(ask(prompt, 40))) as steps:
                for _ in range(tokens):
                    await anext(steps)

        async def all_at_once() -> list[list[int]]:
            *leaving, staying = batch
            _, *answers = await asyncio.gather(
                asyncio.gather(*map(leave, leaving, after)), generate(chunking, ask(staying))
            )
            return cast(list[list[int]], answers[0])

        assert bench.run(all_at_once()) == [reference(batch[-1])]
        check_idle(chunking)


class TestSampling:
    KNOBS = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.8, "frequency_penalty": 1.5, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "min_tokens": 9, "ignore_eos": False, "stop_token_ids": (7, 8)},
    )

    @pytest.mark.parametrize("knobs", KNOBS, ids=str)
    def test_is_the_same_after_a_remote_prefill(
        self, bench: Bench, pair: tuple[Engine, Engine], knobs: dict[str, Any]
    ) -> None:
        for seed in range(3):
            prompt = words(9 + 7 * seed, seed)
            local = bench.run(generate(pair[1], ask(prompt, 24, seed=seed, **knobs)))
            remote = bench.run(hand_off(*pair, ask(prompt, 24, seed=seed, **knobs)))
            assert [remote] == local

    def test_without_a_seed_differs(self, bench: Bench, pair: tuple[Engine, Engine]) -> None:
        requests = [ask(words(9), 16, temperature=1.0) for _ in range(2)]
        one, two = bench.run(generate(pair[0], *requests))
        assert one != two

    def test_repetition_penalty_is_that_of_transformers(
        self, bench: Bench, reference: Reference, pair: tuple[Engine, Engine]
    ) -> None:
        for seed in range(4):
            prompt = words(20, seed)
            answers = bench.run(generate(pair[0], ask(prompt, 20, repetition_penalty=1.8)))
            assert answers == [reference(prompt, 20, repetition_penalty=1.8)]

    def test_the_models_own_end_is_one(self, bench: Bench, pair: tuple[Engine, Engine]) -> None:
        # So hot that each token is as likely as any.
        request = ask(words(5), 900, temperature=100.0, ignore_eos=False, seed=3)
        tokens, finish = bench.run(collect(pair[0].generate(request)))
        assert finish.reason is FinishReason.STOP
        assert finish.stop_token_id is None
        assert tokens.index(EOS) == len(tokens) - 1


def test_the_ticket_of_another_prompt_is_refused(bench: Bench) -> None:
    prefill, decode = bench.pair()
    prefilled = bench.run(prefill.prefill(ask(words(9, 1))))
    with pytest.raises(TicketError, match="another prompt"):
        bench.run(collect(decode.resume(ask(words(9, 2)), prefilled.ticket)))
    check_idle(decode)
    assert bench.run(prefill.release(prefilled.ticket.ticket_id))


def test_engines_of_different_weights_do_not_mix(
    bench: Bench, tmp_path: Path, folder: Path
) -> None:
    other = torch_engine(tiny_llama(tmp_path / "tiny", seed=1))
    info = bench.run(other.start())
    prefilled = bench.run(other.prefill(ask(words(9))))
    decode = bench.engine()
    with pytest.raises(TicketError, match="layout"):
        bench.run(collect(decode.resume(ask(words(9)), prefilled.ticket)))
    bench.run(other.aclose())
    assert info.context_length == CONTEXT_LENGTH


def test_a_crash_in_the_model_ends_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("words of a prompt")

    engine = bench.engine()
    monkeypatch.setattr("kvmesh.engine.torch.runner.pick", fail)
    with pytest.raises(EngineError, match=r"died: RuntimeError$"):
        bench.run(generate(engine, ask(words(9))))
    with pytest.raises(EngineError, match=r"died: RuntimeError$"):
        engine.check()
