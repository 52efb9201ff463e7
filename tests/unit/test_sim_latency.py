"""The latency model: linear, scaled by speed, and off at 0."""

import pytest

from kvmesh.engine.sim.latency import Latency

COSTS = Latency(
    prefill_us_per_token=100,
    decode_us_per_step=5000,
    decode_us_per_sequence=10,
    decode_us_per_kv_token=1,
)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        ((0, 0, 0), 0.0),
        ((200, 0, 0), 0.02),
        ((0, 1, 100), 0.00511),
        ((200, 64, 1000), 0.02 + 0.005 + 0.00064 + 0.001),
    ],
)
def test_sums_what_a_step_computes(work: tuple[int, int, int], seconds: float) -> None:
    assert COSTS.step_seconds(*work) == pytest.approx(seconds)


def test_speed_divides() -> None:
    fast = Latency(prefill_us_per_token=100, speed=10)
    assert fast.step_seconds(200, 0, 0) == pytest.approx(0.002)
    assert fast.waits


def test_no_speed_is_no_waiting() -> None:
    full = Latency(speed=0)
    assert full.step_seconds(10_000, 256, 100_000) == 0
    assert not full.waits
