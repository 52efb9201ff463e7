"""Prompts computed remotely, locally, or as costs tell: the last is as good as the better one.

In virtual time. Load 1 is where the first of the two fixed ways can't keep up. What can't be
best in both is in docs/routing.md.
"""

import random

import pytest

from bench.routing.prefill import (
    TOLERANCE,
    Layout,
    carried,
    compare,
    mixed,
    over_the_better,
    prompts_of,
    saturation,
)
from bench.routing.workloads import fixed

pytestmark = pytest.mark.slow

EVEN, FEW = Layout(4, 4), Layout(2, 6)


@pytest.mark.parametrize("load", [0.02, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("tokens", [100, 2000, 16_000])
@pytest.mark.parametrize("layout", [EVEN, FEW], ids=["4+4", "2+6"])
def test_by_cost_is_as_good_as_the_better_of_remote_and_local(
    layout: Layout, tokens: int, load: float
) -> None:
    ttft, gaps = over_the_better(compare(prompts_of(tokens, load, layout, requests=400), layout))
    pulls_leave_no_room = layout == FEW and tokens == 100 and load == 0.9

    assert ttft <= TOLERANCE or pulls_leave_no_room
    assert gaps <= TOLERANCE


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("load", [0.5, 0.75])
def test_by_cost_is_better_than_both_with_mixed_lengths(load: float, routers: int) -> None:
    layout = Layout(4, 4, routers)
    found = compare(mixed(load, layout), layout)
    ttft, gaps = over_the_better(found)

    assert ttft < 1
    # Better than steps that only decode, nothing can be; and routers that do not know each
    # other's latest answers put together a few too many.
    assert gaps <= TOLERANCE + 0.01 * (routers - 1)
    assert 0 < found["auto"].remote < 1


def test_what_is_carried_is_what_workers_can_compute() -> None:
    prompts = fixed(2000, 128)(random.Random(1), 10)
    remote, local = carried(prompts, EVEN)

    assert remote == pytest.approx(4 / 0.2)
    assert 4 / 0.25 < local < 4 / 0.2  # each answer takes a part of full decode steps as well
    assert saturation(prompts, EVEN) == local
    assert saturation(prompts, FEW) == pytest.approx(2 / 0.2)
