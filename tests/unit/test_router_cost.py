"""What a request costs on a worker, formula by formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.cost import (
    FULLER,
    CostConfig,
    Work,
    beside_prompt,
    decode_seconds,
    eviction_seconds,
    first_token_seconds,
    interference_seconds,
    local_prefill_seconds,
    placement_seconds,
    remote_decode_seconds,
    remote_prefill_seconds,
    transfer_seconds,
    unnoticed_pauses,
    work_seconds,
)

COSTS = CostConfig(
    decode_us_per_request=20,
    decode_us_per_token=0.5,
    work=0.5,
    interference=0.25,
    decode_step_ms=4,
    stall=0.25,
    pause_seconds=0.5,
    pause_share=0.01,
    gather=0.05,
    blocking=1,
    eviction=0.5,
    transfer_ms=2,
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


def test_a_transfer_takes_its_latency_and_its_time_per_token() -> None:
    assert transfer_seconds(1000, 5e-4, COSTS) == pytest.approx(0.002 + 0.5)


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


def local(of: Work, requests: float, wait: float = 0.1) -> float:
    (seconds,) = local_prefill_seconds([of], [requests], wait, COSTS)
    return seconds


def test_a_prefill_makes_all_that_decode_beside_it_pause() -> None:
    busy = work(uncached=1000, queued=500, decoding=4)

    assert local(busy, 4) == pytest.approx(0.15 + 1.5 * 0.004 + 4 * (0.5 + 0.25 * 0.1))


def test_pauses_that_are_few_beside_all_tokens_count_as_those_that_nobody_can_spare() -> None:
    busy = work(uncached=1000, decoding=4, completion=128)
    long = busy._replace(completion=600)

    assert local(busy, 4) == pytest.approx(0.1 + 0.006 + 4 * (0.5 + 0.25 * 0.1))
    assert local(long, 4) == pytest.approx(0.1 + 0.006 + 4 * 0.25 * 0.1)


def test_requests_whose_kv_is_still_to_come_count_as_far_as_they_come_before_its_end() -> None:
    idle = work(uncached=1000)

    assert beside_prompt([idle, idle], [4, 0], wait=0.1) == pytest.approx([4, 0])
    assert beside_prompt([idle, idle], [4, 0], wait=0.4) == pytest.approx([1, 0])
    assert local(idle, 4, wait=0.4) == pytest.approx(0.1 + 1 * (0.5 + 0.25 * 0.1))


def test_prompts_may_be_computed_where_so_few_decode_that_few_gaps_are_long() -> None:
    # Of 40 answers of 128 tokens 51 gaps may be long. Prompts on the first worker make each
    # answer there pause once for each beside it, and each pull on the other makes one gap long.
    assert unnoticed_pauses([5, 35], 128, 0.01) == [False, False]  # 25 + 35
    assert unnoticed_pauses([4, 36], 128, 0.01) == [False, False]  # 16 + 36
    assert unnoticed_pauses([3, 37], 128, 0.01) == [True, False]  # 9 + 37
    # A second worker that is as free pauses as many again: 9 + 25, then 18 + 22, of 36.
    assert unnoticed_pauses([3, 25], 128, 0.01) == [True, False]
    assert unnoticed_pauses([3, 3, 22], 128, 0.01) == [True, False, False]


def test_where_nobody_decodes_nobody_pauses() -> None:
    assert unnoticed_pauses([0, 0], 16, 0.01) == [True, True]
    assert unnoticed_pauses([], 16, 0.01) == []


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 1000))
def test_pauses_are_unnoticed_on_the_freest_workers_first(
    beside: list[int], completion: int
) -> None:
    unnoticed = unnoticed_pauses(beside, completion, 0.0)

    assert all(count == 0 for count, free in zip(beside, unnoticed, strict=True) if free)


def test_a_prefill_worker_is_as_good_as_its_line_is_short() -> None:
    seconds = remote_prefill_seconds(work(uncached=1000, queued=3000), 3, COSTS)

    assert seconds == pytest.approx(0.4 + 3 * 0.1)


def test_decoding_of_what_another_computed_waits_for_local_prompts_and_the_transfer() -> None:
    busy = work(uncached=1000, queued=500, decoding=2, held_tokens=1000, completion=100)
    (seconds,) = remote_decode_seconds([busy], [10], 5e-4, COSTS)

    assert seconds == pytest.approx(0.05 + 0.5 - 10 * FULLER)


def test_answers_of_prompts_computed_elsewhere_gather_while_steps_stay_about_equal() -> None:
    workers = [work(completion=100)] * 3

    def cheapest(requests: list[float]) -> int:
        seconds = remote_decode_seconds(workers, requests, 0.0, COSTS)
        return seconds.index(min(seconds))

    # A step takes 4 ms and 20 us for each request, and may take 5 % more than the mean.
    assert cheapest([0, 1, 0]) == 1
    assert cheapest([0, 12, 0]) == 1
    assert cheapest([3, 30, 0]) == 0


def test_a_step_that_is_too_long_costs_each_token_that_much() -> None:
    workers = [work(completion=100), work(completion=100)]
    seconds = remote_decode_seconds(workers, [0, 100], 0.0, COSTS)

    assert seconds[1] == pytest.approx(100 * (0.006 - 1.05 * 0.005) - 100 * FULLER)
