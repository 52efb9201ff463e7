"""Instruments, as Prometheus reads them."""

import contextlib
import threading

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.telemetry import DURATION_BUCKETS, Telemetry, exposition, quiet_telemetry
from kvmesh.telemetry.metrics import MAX_LABEL_SETS


@pytest.fixture
def telemetry() -> Telemetry:
    return quiet_telemetry()


def samples(telemetry: Telemetry) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(telemetry.render().decode())
        for sample in family.samples
    }


def test_counters_and_gauges(telemetry: Telemetry) -> None:
    meter = telemetry.meter
    requests = meter.counter("kvmesh_requests", "Requests.", labels=("outcome", "role"))
    plain = meter.counter("kvmesh_plain", "Shown as 0 from the start.")
    active = meter.up_down("kvmesh_active", "Requests in flight.")
    meter.gauge("kvmesh_blocks", "Blocks.", lambda: {("used",): 3, ("all",): 8}, labels=("kind",))
    meter.counter_from("kvmesh_received", "Bytes.", lambda: 7, unit="By")
    requests.add(outcome="ok", role="decode")
    requests.add(2, role="decode", outcome="ok")
    active.add(3)
    active.add(-1)
    got = samples(telemetry)
    assert got["kvmesh_requests_total", "ok", "decode"] == 3
    assert got["kvmesh_plain_total",] == 0
    assert got["kvmesh_active",] == 2
    assert got["kvmesh_blocks", "used"] == 3
    assert got["kvmesh_blocks", "all"] == 8
    assert got["kvmesh_received_bytes_total",] == 7
    plain.add()
    assert samples(telemetry)["kvmesh_plain_total",] == 1


def test_durations_have_the_same_buckets_beyond_the_longest_request(telemetry: Telemetry) -> None:
    ttft = telemetry.meter.histogram("kvmesh_ttft", "First token.", labels=("model",))
    ttft.record(0.003, model="m")
    ttft.record(601, model="m")
    got = samples(telemetry)
    bounds = [float(key[1]) for key in got if key[0] == "kvmesh_ttft_seconds_bucket"]
    assert bounds == [*DURATION_BUCKETS, float("inf")]
    assert DURATION_BUCKETS[-2:] == (600, 900)
    assert got["kvmesh_ttft_seconds_bucket", "900.0", "m"] == 2
    assert got["kvmesh_ttft_seconds_sum", "m"] == 601.003
    assert got["kvmesh_ttft_seconds_bucket", "0.005", "m"] == 1
    assert got["kvmesh_ttft_seconds_count", "m"] == 2


def test_standard_names_are_taken_over(telemetry: Telemetry) -> None:
    telemetry.meter.histogram("gen_ai.server.request.duration", "Requests.").record(1)
    assert samples(telemetry)["gen_ai_server_request_duration_seconds_count",] == 1


@pytest.mark.parametrize("name", ["requests", "kvmesh_Requests", "kvmesh-requests", "gen_ai"])
def test_other_names_are_refused(telemetry: Telemetry, name: str) -> None:
    with pytest.raises(ValueError, match="kvmesh_"):
        telemetry.meter.counter(name, "No.")


def test_a_name_is_used_once(telemetry: Telemetry) -> None:
    telemetry.meter.counter("kvmesh_requests", "One.")
    with pytest.raises(ValueError, match="exists already"):
        telemetry.meter.histogram("kvmesh_requests", "Two.")


def test_labels_are_exactly_those_declared(telemetry: Telemetry) -> None:
    counter = telemetry.meter.counter("kvmesh_requests", "Requests.", labels=("a",))
    with pytest.raises(ValueError, match="labels are"):
        counter.add()
    with pytest.raises(ValueError, match="labels are"):
        counter.add(a="1", b="2")
    with pytest.raises(KeyError):
        counter.add(b="1")


def test_label_values_are_bounded_and_nothing_is_lost(telemetry: Telemetry) -> None:
    counter = telemetry.meter.counter("kvmesh_requests", "Requests.", labels=("a", "b"))
    sizes = telemetry.meter.histogram("kvmesh_sizes", "Sizes.", labels=("a",), unit="")
    for number in range(MAX_LABEL_SETS + 10):
        counter.add(a=str(number), b="x")
        sizes.record(1, a=str(number))
    counter.add(a="0", b="x")
    got = samples(telemetry)
    counts = {key: value for key, value in got.items() if key[0] == "kvmesh_requests_total"}
    assert len(counts) == MAX_LABEL_SETS + 1
    assert counts["kvmesh_requests_total", "other", "other"] == 10
    assert counts["kvmesh_requests_total", "0", "x"] == 2
    assert got["kvmesh_sizes_count", "other"] == 10


def test_counters_are_exact_from_many_threads(telemetry: Telemetry) -> None:
    counter = telemetry.meter.counter("kvmesh_requests", "Requests.", labels=("a",))
    start = threading.Barrier(5)

    def work() -> None:
        start.wait()
        for _ in range(2_000):
            counter.add(a="x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        telemetry.render()
    assert samples(telemetry)["kvmesh_requests_total", "x"] == 8_000


def test_scrapes_come_one_after_the_other(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, overlaps = threading.Barrier(2), []

    def meet(_registry: CollectorRegistry) -> bytes:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
            overlaps.append(1)
        return b""

    monkeypatch.setattr(exposition, "generate_latest", meet)
    threads = [threading.Thread(target=telemetry.render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []


def test_the_process_itself_is_measured(telemetry: Telemetry) -> None:
    got = samples(telemetry)
    assert got["process_resident_memory_bytes",] > 1e6
    assert ("process_cpu_seconds_total",) in got


def test_a_gauge_that_fails_hides_only_itself(telemetry: Telemetry) -> None:
    def read() -> float:
        raise RuntimeError("gone")

    telemetry.meter.gauge("kvmesh_broken", "Broken.", read)
    telemetry.meter.gauge("kvmesh_fine", "Fine.", lambda: 1)
    assert samples(telemetry)["kvmesh_fine",] == 1


def test_a_histogram_shows_what_the_sdks_own_would(telemetry: Telemetry) -> None:
    bounds = (0.5, 1.0, 4.0)
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    theirs = provider.get_meter("theirs").create_histogram(
        "gen_ai.server.x", "s", "X.", explicit_bucket_boundaries_advisory=bounds
    )
    ours = telemetry.meter.histogram(
        "gen_ai.server.x", "X.", labels=("gen_ai.operation.name",), buckets=bounds
    )
    for value in (0.0, 0.5, 0.51, 1.0, 3.0, 4.0, 4.1, 1e9):
        theirs.record(value, {"gen_ai.operation.name": "chat"})
        ours.record(value, **{"gen_ai.operation.name": "chat"})
    name = "gen_ai_server_x_seconds"
    expected = {line for line in generate_latest(registry).decode().splitlines() if name in line}
    assert len(expected) >= 7
    assert expected == {line for line in telemetry.render().decode().splitlines() if name in line}


def test_an_empty_label_is_left_out(telemetry: Telemetry) -> None:
    telemetry.meter.histogram("kvmesh_x", "X.", labels=("a", "b")).record(1, a="1", b="")
    assert samples(telemetry)["kvmesh_x_seconds_count", "1"] == 1


def test_a_series_without_values_is_not_shown(telemetry: Telemetry) -> None:
    series = telemetry.meter.histogram("kvmesh_x", "X.", labels=("a",)).series(a="1")
    assert "kvmesh_x_seconds_count" not in telemetry.render().decode()
    series.record(2)
    assert samples(telemetry)["kvmesh_x_seconds_sum", "1"] == 2


def test_histograms_are_exact_from_many_threads(telemetry: Telemetry) -> None:
    histogram = telemetry.meter.histogram("kvmesh_x", "X.", labels=("a",))
    start = threading.Barrier(5)

    def work() -> None:
        start.wait()
        for _ in range(2_000):
            histogram.record(1, a="x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    for thread in threads:
        thread.join()
    got = samples(telemetry)
    assert got["kvmesh_x_seconds_count", "x"] == got["kvmesh_x_seconds_sum", "x"] == 8_000
