"""Headers that explain are valid header text, whatever workers and policies are called."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import UnavailableError
from kvmesh.types import Plan, TextPrompt, Worker
from services.frontend.explanation import Explanation, Failure, kept_local
from services.frontend.request import Request
from services.frontend.rest.asgi import Exchange
from services.frontend.rest.explaining import ASK, MAX_VALUE_CHARS, PREFIX, explaining, tell

NAMES = st.text(max_size=40)


def exchange(*headers: tuple[bytes, bytes]) -> Exchange:
    async def never(*_: Any) -> Any:
        raise AssertionError("nothing is sent or received here")

    return Exchange({"path": "/", "headers": list(headers)}, never, never)


def told(one: Exchange) -> dict[str, bytes]:
    return {name.decode().removeprefix(PREFIX): value for name, value in one.headers}


def plan(name: str = "d0", prefill: str | None = None, **more: Any) -> Plan:
    return Plan(
        Worker(name, "e", "a:1"),
        None if prefill is None else Worker(prefill, "e", "a:2"),
        more.pop("expected", 0),
        more.pop("why", "why"),
        **more,
    )


@given(names=st.lists(NAMES, min_size=7, max_size=7))
def test_every_value_is_visible_ascii_without_edges(names: list[str]) -> None:
    decode, prefill, why, policy, reason, router, failed = names
    explanation = Explanation("r", 1)
    explanation.placed(0, plan(decode, prefill, why=why, policy=policy, reason=reason), router, 1)
    explanation.failed(0, Failure("prefill", failed, "UNAVAILABLE"))
    one = exchange()
    tell(one, explanation, 0)
    for value in told(one).values():
        assert value
        assert all(0x20 <= byte < 0x7F for byte in value)
        assert value == value.strip()
        assert len(value) <= MAX_VALUE_CHARS


def test_names_stay_apart_in_lists_and_can_be_read_back() -> None:
    explanation = Explanation("r", 1)
    explanation.placed(0, plan("dé,1"), "", 1)
    for name in ("a, b", "c"):
        explanation.failed(0, Failure("decode", name, "UNAVAILABLE"))
    one = exchange()
    tell(one, explanation, 0)
    assert told(one)["decode-worker"] == b"d%C3%A9%2C1"
    assert told(one)["failures"] == b"decode a%2C%20b UNAVAILABLE, decode c UNAVAILABLE"


def test_long_values_are_cut() -> None:
    explanation = Explanation("r", 1)
    explanation.placed(0, plan(why="w" * 5000), "", 1)
    one = exchange()
    tell(one, explanation, 0)
    assert told(one)["why"] == b"w" * MAX_VALUE_CHARS


def test_attempts_count_where_it_was_placed_and_failures_stay() -> None:
    explanation = Explanation("r", 2)
    explanation.placed(1, plan("d0"), "r0", 5)
    explanation.failed(1, Failure("decode", "d0", "UNAVAILABLE"))
    explanation.placed(1, plan("d1"), "r0", 5)
    placed = explanation.of(1)
    assert placed is not None
    assert (placed.plan.decode.id, placed.attempts, len(placed.failures)) == ("d1", 2, 1)
    assert explanation.of(0) is None
    assert explanation.first() == 1


def test_a_plan_without_prefill_keeps_its_own_reason() -> None:
    local = plan(reason="short")
    assert kept_local(local, "prefill_failed") is local
    changed = kept_local(plan(prefill="p0", reason="configured"), "prefill_failed")
    assert (changed.prefill, changed.reason) == (None, "prefill_failed")


def test_a_response_that_has_begun_gets_no_more_headers() -> None:
    one = exchange((ASK, b"true"))
    one.started = True
    request = Request("m", (TextPrompt("x"),), 1.0)
    with pytest.raises(UnavailableError), explaining(one, request, allowed=True):
        raise UnavailableError("gone")
    assert one.headers == []
