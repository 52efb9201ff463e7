"""What a request costs on a worker, formula by formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.cost import (
    CostConfig,
    Work,
    decode_seconds,
    eviction_seconds,
    first_token_seconds,
    interference_seconds,
    placement_seconds,
    prefill_remotely,
    transfer_seconds,
    work_seconds,
)

COSTS = CostConfig(
    decode_us_per_request=20,
    decode_us_per_token=0.5,
    work=0.5,
    interference=0.25,
    stall=0.25,
    eviction=0.5,
    transfer_ms=2,
    transfer_gb_per_second=2,
)
AMOUNT = st.integers(0, 100_000)
WORK = st.builds(Work, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, st.floats(1, 1e4))


def work(**figures: float) -> Work:
    idle = dict.fromkeys(Work._fields, 0.0) | {"prefill_us": 100.0}
    return Work(**(idle | figures))


def total(of: Work, costs: CostConfig = COSTS) -> float:
    (seconds,) = placement_seconds([of], costs)
    return seconds


def test_the_first_token_waits_for_what_is_queued_and_for_its_own_prompt() -> None:
    assert first_token_seconds(work(uncached=1000, queued=500)) == pytest.approx(0.15)


def test_a_prefill_costs_those_that_come_after_it() -> None:
    assert work_seconds(work(uncached=1000, queued=500), COSTS) == pytest.approx(0.05)


def test_a_prefill_holds_up_each_request_beside_it() -> None:
    assert interference_seconds(work(uncached=1000, decoding=4), 0.25) == pytest.approx(0.1)
    assert interference_seconds(work(decoding=4, queued=1000), 0.25) == 0


def test_decoding_costs_by_requests_and_by_the_kv_that_they_hold() -> None:
    busy = work(completion=100, decoding=10, held_tokens=1000)

    assert decode_seconds(busy, COSTS) == pytest.approx(100 * (200 + 500) * 1e-6)


def test_what_is_evicted_is_partly_computed_again() -> None:
    assert eviction_seconds(work(evicted=1000), COSTS) == pytest.approx(0.05)


def test_a_transfer_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    assert transfer_seconds(1000, 1e6, COSTS) == pytest.approx(0.002 + 0.5)


@given(st.lists(WORK, max_size=5))
def test_a_placement_costs_the_sum_of_its_parts(works: list[Work]) -> None:
    sums = [
        first_token_seconds(each)
        + work_seconds(each, COSTS)
        + interference_seconds(each, COSTS.interference)
        + decode_seconds(each, COSTS)
        + eviction_seconds(each, COSTS)
        for each in works
    ]

    assert placement_seconds(works, COSTS) == pytest.approx(sums)


@given(WORK, st.sampled_from(Work._fields), st.integers(1, 1000))
def test_more_of_anything_never_costs_less(of: Work, name: str, more: int) -> None:
    assert total(of._replace(**{name: getattr(of, name) + more})) >= total(of)


@given(WORK, st.integers(1, 1000))
def test_workers_with_unequal_queues_never_look_equal(of: Work, more: int) -> None:
    assert total(of._replace(queued=of.queued + more)) > total(of)


@pytest.mark.parametrize(
    ("local", "remote", "remotely"),
    [
        # Idle, both: the transfer is for nothing.
        (work(uncached=1000), work(uncached=1000), False),
        # The decode worker has most of it cached.
        (work(uncached=50, decoding=8), work(uncached=1000), False),
        # Many decode there, and would be held up.
        (work(uncached=1000, decoding=40), work(uncached=1000), True),
        # Prefill's queue is longer than that is worth.
        (work(uncached=1000, decoding=40), work(uncached=1000, queued=20_000), False),
        # The prefill worker has it cached.
        (work(uncached=10_000), work(uncached=10), True),
        # The prefill worker is far quicker.
        (work(uncached=1000, prefill_us=2000), work(uncached=1000, prefill_us=100), True),
    ],
)
def test_a_prompt_is_prefilled_where_that_is_quicker(
    local: Work, remote: Work, remotely: bool
) -> None:
    assert prefill_remotely(local, remote, 1000, COSTS) == remotely


def test_a_slow_network_keeps_prompts_where_they_are() -> None:
    slow = CostConfig(transfer_gb_per_second=0.001)

    assert not prefill_remotely(
        work(uncached=1000, decoding=40), work(uncached=1000), 100_000, slow
    )
