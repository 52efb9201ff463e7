"""The simulated mesh itself: every request ends, equal seeds agree, lost events heal."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.routing.feed import Wire
from bench.routing.gaps import Durations
from bench.routing.mesh import MeshConfig, Run, simulate
from bench.routing.report import Slo, Summary, summary
from bench.routing.request import BLOCK, Conversation, Request
from bench.routing.traces import read_trace, write_trace
from bench.routing.worker import WorkerConfig
from bench.routing.workloads import WORKLOADS, in_bursts, poisson
from kvmesh.types import Role
from services.router.planner import Prefill, RoutingConfig

LATE = Wire(delay=0.005, jitter=0.005)


def conversations(workload: str, requests: int = 150, rate: float = 20) -> list[Conversation]:
    rng = random.Random(workload)
    made = WORKLOADS[workload].make(rng, requests)
    pace = in_bursts if WORKLOADS[workload].bursts else poisson
    pace(rng, made, rate)
    return made


def run(config: MeshConfig, workload: str = "system") -> tuple[Run, Summary]:
    result = simulate(config, conversations(workload))
    return result, summary(result, Slo())


@pytest.mark.parametrize("prefill", list(Prefill))
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_request_ends_and_leaves_nothing_behind(workload: str, prefill: Prefill) -> None:
    config = MeshConfig(
        routing=RoutingConfig(prefill=prefill), decode=3, prefill=2, routers=2, wire=LATE
    )
    result, figures = run(config, workload)

    assert figures.refused == 0
    assert result.left_over == 0
    assert all(0 < request.ttft < result.seconds for request in result.requests)
    assert all(request.gaps > 0 for request in result.requests)
    assert all(request.cached <= request.prompt for request in result.requests)
    assert (figures.remote > 0) == (prefill is not Prefill.LOCAL)


def test_equal_seeds_are_equal_runs_and_others_are_not() -> None:
    config = MeshConfig(routers=2, wire=replace(LATE, loss=0.02))

    assert run(config)[1] == run(config)[1]
    assert run(config)[1] != run(replace(config, seed=2))[1]


def test_caches_are_worth_knowing() -> None:
    routed = MeshConfig(routers=2, wire=LATE)
    turns = replace(routed, routing=RoutingConfig(policy="round_robin"))

    assert run(routed)[1].hit_rate > 1.2 * run(turns)[1].hit_rate


def test_a_closed_loop_never_has_more_requests_than_clients() -> None:
    result, figures = run(replace(MeshConfig(decode=2), concurrency=4))
    ends = [r.arrived + r.ttft + r.gaps - 1e-6 for r in result.requests]
    at_once = max(
        sum(r.arrived <= other.arrived < end for r, end in zip(result.requests, ends, strict=True))
        for other in result.requests
    )

    assert figures.requests == len(result.requests)
    assert at_once == 4


def test_lost_events_are_healed_by_a_snapshot() -> None:
    whole, _ = run(MeshConfig(wire=LATE))
    broken, figures = run(MeshConfig(wire=replace(LATE, loss=0.05)))

    assert whole.streams == 8
    assert broken.streams > 8
    assert figures.hit_rate > 0.9 * summary(whole, Slo()).hit_rate


def test_a_transfer_delays_the_second_token_and_not_the_first() -> None:
    def alone(prefill: Prefill, bytes_per_second: float) -> Request:
        worker = WorkerConfig(transfer_bytes_per_second=bytes_per_second)
        config = MeshConfig(RoutingConfig(prefill=prefill), 1, 1, worker=worker)
        request = Request([7 * number for number in range(1024 // BLOCK)], 1000, 2)
        simulate(config, [Conversation([request])])
        return request

    local, near, far = (
        alone(Prefill.LOCAL, 1e9),
        alone(Prefill.REMOTE, 1e9),
        alone(Prefill.REMOTE, 1e8),
    )

    assert near.ttft == pytest.approx(local.ttft)
    assert far.ttft == pytest.approx(local.ttft)
    assert far.gaps - near.gaps == pytest.approx(1000 * 65_536 * (1e-8 - 1e-9))


def test_decode_steps_are_those_of_the_latency_model_however_they_are_cut() -> None:
    """A second request comes in the middle of a long decode; nothing else runs."""
    config = MeshConfig(decode=1)
    first, second = Request([], 10, 101), Request([], 10, 2)
    alone = simulate(config, [Conversation([first])])
    latency = config.worker.latency
    expected = sum(latency.step_seconds(0, 1, 10 + tokens) for tokens in range(1, 101))
    assert first.gaps == pytest.approx(expected)

    both = Request([], 10, 101)
    simulate(config, [Conversation([both]), Conversation([second], start=0.2)])
    # One step has ten prompt tokens beside it, another decodes two.
    beside = latency.step_seconds(10, 0, 0) + latency.step_seconds(0, 1, 11) - 0.00575
    assert both.gaps == pytest.approx(expected + beside, rel=1e-5)
    assert alone.busy_seconds[Role.DECODE] == [pytest.approx(expected + 0.001)]


def test_durations_keep_their_quantiles() -> None:
    durations = Durations()
    assert durations.quantile(0.5) == 0
    durations.add(0.001, 98)
    durations.add(0.5, 2)

    assert durations.quantile(0.5) == pytest.approx(0.001, rel=0.01)
    assert durations.quantile(0.99) == pytest.approx(0.5, rel=0.01)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests=50, rate=10, rng=random.Random(1))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    made = read_trace(path)
    figures = summary(simulate(MeshConfig(decode=2), made), Slo())

    assert [each.turns[0].prompt for each in made] == [e["input_length"] for e in entries]
    assert [each.start for each in made] == [e["timestamp"] / 1000 for e in entries]
    assert figures.requests == 50
    assert figures.hit_rate > 0.3
    assert len(read_trace(path, limit=7)) == 7
    assert read_trace(path, speed=2)[-1].start == pytest.approx(made[-1].start / 2)


def test_equal_hash_ids_are_equal_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entry = {"timestamp": 0, "input_length": 1100, "output_length": 3}
    ids = ([1, 2, 3], [1, 2, 4], [9, 2, 3])
    path.write_text("".join(json.dumps({**entry, "hash_ids": each}) + "\n" for each in ids))
    first, second, third = (each.turns[0].prompt_hashes for each in read_trace(path))

    assert len(first) == 1100 // BLOCK
    assert first[:16] == second[:16]
    assert not set(first[16:]) & set(second[16:])
    assert not set(first) & set(third)


@pytest.mark.parametrize("line", ["no json", "{}", '{"timestamp": 0, "input_length": 2000,'
    ' "output_length": 1, "hash_ids": [1]}'])  # fmt: skip
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")

    with pytest.raises(ValueError, match=r"trace\.jsonl:1"):
        read_trace(path)


def test_what_never_fits_ends_the_run() -> None:
    config = MeshConfig(decode=1, worker=WorkerConfig(blocks=8))

    with pytest.raises(ValueError, match="1000 tokens do not fit"):
        simulate(config, [Conversation([Request([], 1000, 2)])])
