"""Spans: their place in the trace, their end, and what they may say."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvmesh.errors import TicketError
from kvmesh.telemetry import Tracer, current_span, parse_traceparent, quiet_telemetry

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"
MALFORMED = [
    "x",
    PARENT[:-1],
    PARENT + "0",
    PARENT + "-00",
    PARENT.upper(),
    "ff" + PARENT[2:],
    f"00-{'0' * 32}-00f067aa0ba902b7-01",
    f"00-{TRACE}-{'0' * 16}-01",
    PARENT.replace("-", "_"),
    "00-" + "é" * 52,
    "x" * 100_000,
    "01" + PARENT[2:] + "-" + "0" * 100_000,
    " " + PARENT[:-1],
]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Tracer:
    return quiet_telemetry(spans).tracer


def test_a_span_sits_under_its_parent_in_another_process(
    tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    with tracer.span("prefill", PARENT, {"tokens": 3}) as span:
        span.set("worker", "w")
        span.event("first token", {"n": 1})
    (done,) = spans.get_finished_spans()
    assert done.parent is not None
    assert f"{done.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert span.trace_id == TRACE
    assert span.traceparent == f"00-{TRACE}-{done.context.span_id:016x}-01"
    assert done.attributes == {"tokens": 3, "worker": "w"}
    assert [event.name for event in done.events] == ["first token"]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_parent_begins_a_new_trace(
    tracer: Tracer, spans: InMemorySpanExporter, text: str
) -> None:
    assert parse_traceparent(text) == ""
    with tracer.span("request", text) as span:
        assert parse_traceparent(span.traceparent)
    (done,) = spans.get_finished_spans()
    assert done.parent is None
    assert span.trace_id != TRACE


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parse_traceparent("01" + PARENT[2:] + "-more") == "01" + PARENT[2:]
    assert parse_traceparent("01" + PARENT[2:]) == "01" + PARENT[2:]


def test_what_the_caller_did_not_sample_is_not_recorded(
    tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    with tracer.span("request", UNSAMPLED) as span, span.child("step") as child:
        assert span.traceparent[-2:] == child.traceparent[-2:] == "00"
        assert span.trace_id == child.trace_id == TRACE
    assert spans.get_finished_spans() == ()


def test_children_nest_and_outlive_their_parent(
    tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    with tracer.span("outer") as outer:
        pass
    with outer.child("inner") as inner:
        pass
    first, second = spans.get_finished_spans()
    assert inner.trace_id == outer.trace_id
    assert second.parent is not None
    assert second.parent.span_id == first.context.span_id
    assert not second.parent.is_remote


@pytest.mark.parametrize(
    ("error", "reason", "told"),
    [
        (TicketError("used twice"), "TICKET_REFUSED", "used twice"),
        (asyncio.CancelledError(), "CANCELLED", None),
        (GeneratorExit(), "CANCELLED", None),
        (KeyError("the prompt"), "KeyError", None),
    ],
)
def test_a_failure_is_recorded_by_its_reason(
    tracer: Tracer,
    spans: InMemorySpanExporter,
    error: BaseException,
    reason: str,
    told: str | None,
) -> None:
    def fail() -> None:
        with tracer.span("pull"):
            raise error

    with pytest.raises(type(error)):
        fail()
    (done,) = spans.get_finished_spans()
    assert done.status.status_code is StatusCode.ERROR
    assert done.status.description == told
    assert done.attributes == {"error.type": reason}
    assert "the prompt" not in done.to_json()


def test_a_span_ends_once(
    tracer: Tracer, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    with tracer.span("decode") as span:
        span.end(TicketError("late"))
        span.end()
        span.set("after", 1)
        span.event("after")
    (done,) = spans.get_finished_spans()
    assert done.status.status_code is StatusCode.ERROR
    assert done.attributes == {"error.type": "TICKET_REFUSED"}
    assert caplog.records == []


def test_without_an_exporter_the_context_passes_through() -> None:
    tracer = Tracer()
    with tracer.span("request", PARENT, {"a": 1}) as span, span.child("step") as child:
        span.set("a", 1)
        span.event("b")
        assert span.traceparent == child.traceparent == PARENT
    assert tracer.span("request", UNSAMPLED).traceparent == UNSAMPLED
    for text in ["", *MALFORMED]:
        assert tracer.span("request", text).traceparent == ""


async def test_concurrent_requests_keep_their_own_current_span(tracer: Tracer) -> None:
    seen: dict[str, bool] = {}
    both = asyncio.Barrier(2)

    async def request(name: str) -> None:
        with tracer.span(name) as span:
            await both.wait()
            with span.child("inner") as inner:
                await both.wait()
                seen[name] = current_span() is inner
            seen[name] &= current_span() is span

    async with asyncio.TaskGroup() as group:
        group.create_task(request("a"))
        group.create_task(request("b"))
    assert seen == {"a": True, "b": True}
    assert current_span() is None


async def test_a_span_in_a_generator_may_be_closed_by_another_task(
    tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    async def stream() -> AsyncGenerator[int, None]:
        with tracer.span("stream"):
            yield 1
            yield 2

    async def first(items: AsyncGenerator[int, None]) -> None:
        assert await anext(items) == 1

    items = stream()
    await asyncio.create_task(first(items))
    with tracer.span("own") as own:
        await items.aclose()
        assert current_span() is own
    assert [span.name for span in spans.get_finished_spans()] == ["stream", "own"]
