"""Where a prompt is computed, by what that costs."""

import random

import pytest

from kvmesh.types import Member, Role
from services.router.cost import CostConfig, Work
from services.router.policy import Candidate
from services.router.split import Split, split
from services.router.worker import WorkerState

COSTS = CostConfig(transfer_ms=2, pause_seconds=0.1, stall=0.25)


def candidate(name: str, requests: int = 0, **figures: float) -> Candidate:
    idle = dict.fromkeys(Work._fields, 0.0) | {"prefill_us": 100.0}
    worker = WorkerState(Member(name, Role.DECODE, "e1", name), None)
    count = requests or int(figures.get("decoding", 0))
    return Candidate(worker, 0.0, count, 0, Work(**(idle | figures)))


def choose(decode: list[Candidate], prefill: Candidate, token_seconds: float = 5e-7) -> Split:
    return split(decode, prefill, token_seconds, COSTS, random.Random(1))


@pytest.mark.parametrize(
    ("local", "remote", "remotely"),
    [
        # Idle, both: the transfer is for nothing.
        ({"uncached": 1000}, {"uncached": 1000}, False),
        # The decode worker has most of it cached.
        ({"uncached": 50, "decoding": 0}, {"uncached": 1000}, False),
        # Many decode there, and would have to pause.
        ({"uncached": 1000, "decoding": 40}, {"uncached": 1000}, True),
        # Prefill's queue is longer than that is worth.
        ({"uncached": 1000, "decoding": 40}, {"uncached": 1000, "queued": 100_000}, False),
        # So many are queued there that this one would make late.
        ({"uncached": 9000, "decoding": 1}, {"uncached": 9000, "requests": 9}, False),
        # The prefill worker has it cached.
        ({"uncached": 10_000}, {"uncached": 10}, True),
        # The prefill worker is far quicker.
        ({"uncached": 1000, "prefill_us": 2000}, {"uncached": 1000}, True),
    ],
)
def test_a_prompt_is_prefilled_where_that_costs_less(
    local: dict[str, float], remote: dict[str, float], remotely: bool
) -> None:
    requests = int(remote.pop("requests", 0))
    prefill = candidate("p0", requests, **remote)

    assert choose([candidate("d0", **local)], prefill).remotely == remotely


def test_a_slow_network_keeps_prompts_where_they_are() -> None:
    busy = candidate("d0", uncached=1000, decoding=40)

    assert choose([busy], candidate("p0", uncached=1000)).remotely
    assert not choose([busy], candidate("p0", uncached=1000), token_seconds=0.1).remotely


def test_each_way_has_the_decode_worker_that_suits_it() -> None:
    # One decodes nothing but computes a prompt for a while yet, the other decodes many.
    computing = candidate("d0", uncached=1000, queued=5000, completion=100)
    decoding = candidate("d1", uncached=1000, decoding=20, completion=100)
    chosen = choose([computing, decoding], candidate("p0", uncached=1000, queued=50_000))

    assert chosen.local.id == "d0"
    assert chosen.remote.id == "d1"
    assert not chosen.remotely


def test_answers_gather_so_that_prompts_have_a_free_worker() -> None:
    names = ["d0", "d1", "d2"]
    busy = [
        candidate(n, uncached=1000, decoding=d, completion=128)
        for n, d in zip(names, (4, 5, 3), strict=True)
    ]
    chosen = choose(busy, candidate("p0", uncached=1000))

    assert chosen.remote.id == "d1"
    assert chosen.local.id == "d2"


def test_equals_are_drawn_by_lot() -> None:
    idle = [candidate(f"d{number}", uncached=1000) for number in range(4)]
    rng = random.Random(1)
    prefill = candidate("p0", uncached=1000)
    drawn = {split(idle, prefill, 5e-7, COSTS, rng).local.id for _ in range(50)}

    assert len(drawn) == 4
