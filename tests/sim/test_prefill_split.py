"""Prompts computed remotely, locally, or as costs tell: the last is as good as the better one.

Four prefill and four decode workers in virtual time. Load 1 is all that the prefill workers
can compute. Beyond that who waits less decodes slower, so nothing can be best in both.
"""

from dataclasses import replace

import pytest

from bench.routing.prefill import TOLERANCE, compare, mixed, over_the_better, prompts_of

pytestmark = pytest.mark.slow

STEP_SECONDS = 0.0005
"""Decode steps differ by so much with how evenly the running requests are spread."""


@pytest.mark.parametrize("load", [0.02, 0.3, 0.85, 1.0])
@pytest.mark.parametrize("tokens", [100, 2000, 16_000])
def test_by_cost_is_as_good_as_the_better_of_remote_and_local(tokens: int, load: float) -> None:
    requests = 50 if load < 0.1 else 200
    found = compare(replace(prompts_of(tokens, load), requests=requests))
    ttft, gaps = over_the_better(found)
    better = min(found["remote"].gap_p99, found["local"].gap_p99)

    assert ttft <= TOLERANCE
    assert gaps <= TOLERANCE or found["auto"].gap_p99 <= better + STEP_SECONDS


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("rate", [8, 16])
def test_by_cost_is_better_than_both_with_mixed_lengths(rate: float, routers: int) -> None:
    found = compare(mixed(rate), routers=routers)
    ttft, gaps = over_the_better(found)

    assert ttft < 1
    assert gaps <= 1.03  # better than steps that only decode, nothing can be
    assert 0 < found["auto"].remote < 1
