"""The simulated model: content decides, and every way to compute it agrees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.model import WORD, KvMemory, SimModel, expected, lanes, origin

MODEL = SimModel(origin=origin("m", 0), block_size=4, low=100, high=1000, eos_token_id=2)
prompts = st.lists(st.integers(0, 999), min_size=1, max_size=20)


def computed(memory: KvMemory, prompt: list[int], cuts: list[int]) -> int:
    """Write a prompt in pieces into blocks in reverse order; return its digest."""
    blocks = list(range(9, -1, -1))
    base = digest = MODEL.origin
    done = 0
    for stop in [*sorted(min(cut, len(prompt)) for cut in cuts), len(prompt)]:
        while done < stop:
            index, offset = divmod(done, 4)
            count = min(4 - offset, stop - done)
            part = lanes(prompt[done : done + count], done)
            digest = memory.write(base, part, blocks[index], offset)
            done += count
            if done % 4 == 0:
                base = digest
    return digest


@given(prompts, st.lists(st.integers(0, 20), max_size=3))
@settings(deadline=None)
def test_pieces_do_not_matter(prompt: list[int], cuts: list[int]) -> None:
    memory = KvMemory(memoryview(bytearray(10 * 4 * WORD)), 4)
    digest = computed(memory, prompt, cuts)
    assert MODEL.pick(digest) == expected(MODEL, prompt, 1)[0]
    full, part = divmod(len(prompt), 4)
    blocks = list(range(9, -1, -1))
    read = memory.fold(MODEL.origin, blocks[:full])
    if part:
        read = memory.fold_part(read, blocks[full], part)
    assert read == digest


@given(prompts, st.data())
@settings(deadline=None)
def test_any_changed_byte_changes_the_digest(prompt: list[int], data: st.DataObject) -> None:
    memory = KvMemory(memoryview(bytearray(10 * 4 * WORD)), 4)
    digest = computed(memory, prompt, [])
    at = data.draw(st.integers(0, len(prompt) - 1))
    block = 9 - at // 4
    memory.raw[(block * 4 + at % 4) * WORD + data.draw(st.integers(0, WORD - 1))] ^= 1
    full, part = divmod(len(prompt), 4)
    read = memory.fold(MODEL.origin, list(range(9, 9 - full, -1)))
    read = memory.fold_part(read, 9 - full, part) if part else read
    assert read != digest


@given(prompts, st.integers(0, 19), st.integers(1, 999))
@settings(deadline=None)
def test_each_prompt_token_counts(prompt: list[int], at: int, shift: int) -> None:
    other = prompt.copy()
    other[at % len(prompt)] = (other[at % len(prompt)] + shift) % 1000
    if other != prompt:
        assert expected(MODEL, prompt, 6) != expected(MODEL, other, 6)


def test_answers_extend_each_other() -> None:
    six = expected(MODEL, [1, 2, 3], 6)
    assert expected(MODEL, [1, 2, 3], 3) == six[:3]
    assert expected(MODEL, [1, 2, 3, *six[:3]], 3) == six[3:]


def test_values_do_not_drift() -> None:
    assert expected(SimConfig().model("x"), [5 + i for i in range(200)], 3) == [21180, 3729, 6343]


def test_picks_stay_in_range_and_avoid_what_is_banned() -> None:
    narrow = SimModel(origin=1, block_size=4, low=10, high=13, eos_token_id=2)
    assert {narrow.pick(digest) for digest in range(100)} == {10, 11, 12}
    assert {narrow.pick(digest, 0, frozenset({10, 12})) for digest in range(100)} == {11}


def test_salts_are_streams() -> None:
    streams = {tuple(expected(MODEL, [1, 2], 6, salt=salt)) for salt in range(20)}
    assert len(streams) == 20


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_eos_comes_about_as_often_as_asked(probability: float) -> None:
    model = SimModel(origin(str(probability), 0), 4, 100, 1000, 2, probability)
    ids = expected(model, [1], 4000)
    assert ids.count(2) / 4000 == pytest.approx(probability, abs=0.03)
    assert 2 not in expected(model, [1], 200, banned=frozenset({2}))


def test_names_and_seeds_are_models() -> None:
    answers = {
        tuple(expected(SimConfig(seed=number).model(name), [1, 2, 3], 4))
        for number in (0, 1)
        for name in ("a", "b")
    }
    assert len(answers) == 4
