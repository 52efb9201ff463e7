"""Batching and preemption step by step, without an engine around them."""

from dataclasses import replace

import pytest

from kvmesh.engine.base import EngineRequest
from kvmesh.engine.batch import Batch
from kvmesh.engine.sequence import Kind, Phase
from kvmesh.engine.sim.compute import Computer, Outcome
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.engine.sim.model import KvMemory, expected
from kvmesh.engine.sim.ranking import Ranking
from kvmesh.engine.sim.sequence import SimSequence
from kvmesh.kv.pool import BlockPool
from kvmesh.types import Sampling, TokenLogprob

CONFIG = SimConfig(block_size=4, total_blocks=16, latency=Latency(speed=1))
MODEL = CONFIG.model("m")


class Line(Batch[SimSequence]):
    """A batch and what computes its steps."""

    def __init__(self, config: SimConfig) -> None:
        super().__init__(
            BlockPool(config.total_blocks),
            block_size=config.block_size,
            max_batch=config.max_batch,
            salt="m",
        )
        memory = KvMemory(memoryview(bytearray(config.pool_layout.size)), config.block_size)
        self._computer = Computer(MODEL, memory, config.max_batch_tokens)

    def step(self) -> Outcome:
        return self._computer.step(self)


def sequence(prompt: list[int], max_tokens: int, priority: int = 0) -> SimSequence:
    request = EngineRequest(str(prompt), prompt, Sampling(max_tokens), priority=priority)
    return SimSequence(request, Kind.GENERATE, None, lambda _: None, CONFIG.limits)


def completion(one: SimSequence) -> list[int]:
    return one.tokens[one.prompt_length :]


def test_the_last_in_line_that_still_runs_is_preempted() -> None:
    line = Line(replace(CONFIG, total_blocks=3))
    ending, middle, first = sequence([1, 2], 3, 2), sequence([3] * 3, 9, 1), sequence([4] * 3, 9)
    for each in (ending, middle, first):
        line.add(each)
        line.admit()
    line.step()  # prompts
    line.step()
    outcome = line.step()  # `ending` ends, `middle` takes its block, `first` takes that
    assert [each for each, _, finish in outcome.tokens if finish] == [ending]
    assert line.waiting == [middle]
    assert (line.running, ending.phase) == ([first], Phase.ENDED)
    while line.running or line.waiting:
        line.admit()
        line.step()
    assert completion(middle) == expected(MODEL, [3] * 3, 9)
    assert completion(first) == expected(MODEL, [4] * 3, 9)


def announced(prompt: list[int], priority: int = 0) -> SimSequence:
    request = EngineRequest(str(prompt), prompt, Sampling(2), priority=priority)
    one = SimSequence(request, Kind.PREFILL, None, lambda _: None, CONFIG.limits)
    one.announce = lambda _, __: None
    return one


def test_an_announced_prompt_is_not_preempted() -> None:
    line = Line(replace(CONFIG, total_blocks=5, max_batch_tokens=2))
    growing, promised = sequence([4] * 3, 12), announced(list(range(300, 316)), priority=1)
    line.add(growing)
    line.admit()
    line.step()
    line.step()
    line.add(promised)
    line.admit()
    while promised.phase is Phase.RUNNING:
        line.step()
    assert line.waiting == [growing]  # though it came first, and goes first
    assert promised.phase is Phase.HELD
    line.end(promised)
    while growing.phase is not Phase.ENDED:
        line.admit()
        line.step()
    assert completion(growing) == expected(MODEL, [4] * 3, 12)


def test_an_announced_prompt_keeps_blocks_that_others_have_too() -> None:
    line = Line(replace(CONFIG, max_batch_tokens=6))
    prompt = list(range(300, 310))
    twins = [announced(prompt), announced(prompt)]
    for each in twins:
        line.add(each)
    line.admit()
    blocks = [each.blocks.copy() for each in twins]
    while line.prompts:
        line.step()
    assert [each.blocks for each in twins] == blocks
    assert line.pool.used == 6
    assert line.pool.lookup(twins[0].hashes) == blocks[0][:2]


def test_a_step_computes_no_more_than_its_budget() -> None:
    line = Line(replace(CONFIG, max_batch_tokens=5))
    one, two = sequence([1] * 12, 2), sequence([2] * 3, 2)
    line.add(one)
    line.add(two)
    line.admit()
    assert [line.step().prefill_tokens for _ in range(3)] == [5, 5, 5]
    assert completion(one) == expected(MODEL, [1] * 12, 1)
    assert completion(two) == expected(MODEL, [2] * 3, 1)


def test_a_step_tells_what_it_did() -> None:
    line = Line(CONFIG)
    for number in (1, 2):
        line.add(sequence([number] * 5, 3))
    line.admit()
    first, second = line.step(), line.step()
    assert (first.prefill_tokens, first.decodes) == (10, 0)
    assert (second.prefill_tokens, second.decodes, second.kv_tokens) == (0, 2, 12)


def test_the_batch_is_bounded() -> None:
    line = Line(replace(CONFIG, max_batch=2))
    for number in range(4):
        line.add(sequence([number], 2))
    line.admit()
    assert (len(line.prompts), len(line.waiting)) == (2, 2)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_removing_frees(steps: int) -> None:
    line = Line(CONFIG)
    one = sequence([1] * 9, 9)
    line.add(one)
    for _ in range(steps):
        line.admit()
        line.step()
    assert bool(line.pool.used) == bool(steps)
    line.remove(one)
    assert line.pool.used == 0
    assert [line.waiting, line.prompts, line.running] == [[], [], []]


def scoring(prompt: list[int]) -> SimSequence:
    sampling = Sampling(3, prompt_logprobs=1)
    request = EngineRequest(str(prompt), prompt, sampling)
    return SimSequence(request, Kind.GENERATE, None, lambda _: None, CONFIG.limits)


def right_scores(prompt: list[int]) -> list[tuple[int, float]]:
    """Return the likeliest token behind each part of the prompt, and the real one's logprob."""
    return [
        (expected(MODEL, prompt[:length], 1)[0], of_next(prompt[:length], prompt[length]))
        for length in range(1, len(prompt))
    ]


def of_next(prompt: list[int], token: int) -> float:
    (first,) = expected(MODEL, prompt, 1)
    return Ranking(MODEL.low, MODEL.high, first).logprob(token)


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 100])
def test_pieces_of_a_prompt_are_scored_as_the_whole(budget: int) -> None:
    line = Line(replace(CONFIG, max_batch_tokens=budget))
    prompt = [300, 301, *range(400, 411)]
    line.add(one := scoring(prompt))
    line.admit()
    while not completion(one):
        line.step()
    assert one.scores is not None
    assert [(each.top[0][0], each.logprob) for each in one.scores] == right_scores(prompt)


def test_a_preempted_prompt_is_scored_once_and_its_rest_computed() -> None:
    line = Line(replace(CONFIG, max_batch_tokens=2, total_blocks=5))
    ahead, one = sequence([9] * 3, 12, priority=-1), scoring(list(range(300, 311)))
    for each in (ahead, one):
        line.add(each)
    line.admit()
    while line.preemptions == 0:
        line.step()
    assert one.scores
    assert 4 < len(one.scores) < 8
    assert (one.phase, completion(one)) == (Phase.WAITING, [])
    while not completion(one):
        line.admit()
        line.step()
    found = [(each.top[0][0], each.logprob) for each in one.scores]
    assert found == right_scores(list(range(300, 311)))


@pytest.mark.parametrize(("known", "hits"), [(0, 0), (3, 0), (4, 4), (7, 4), (12, 12)])
def test_no_more_is_taken_from_the_cache_than_was_scored(known: int, hits: int) -> None:
    line = Line(CONFIG)
    prompt = list(range(300, 314))
    line.add(first := sequence(prompt, 1))
    line.admit()
    line.step()
    assert first.phase is Phase.ENDED
    line.add(one := scoring(prompt))
    assert one.scores is not None
    one.scores += [TokenLogprob(0.0)] * known
    line.admit()
    assert one.computed == one.cached_tokens == hits
