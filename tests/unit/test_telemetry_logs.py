"""Log lines: one a record, with what is needed to find the request."""

import io
import json
import logging
import re

import pytest

from kvmesh.errors import EngineError, InvalidRequestError
from kvmesh.telemetry import Tracer, log_to

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
logger = logging.getLogger("kvmesh.test")


def test_a_line_has_time_level_role_logger_and_trace() -> None:
    stream = io.StringIO()
    with log_to(stream, role="router"):
        with Tracer().span("request", PARENT):
            logger.info("picked %s", "w1")
        logger.debug("not at this level")
        logger.warning("alone")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO router kvmesh\.test: picked w1"
        r" trace=4bf92f3577b34da6a3ce929d0e0e4736",
        first,
    )
    assert second.endswith("WARNING router kvmesh.test: alone")


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_record_is_one_line_whatever_it_holds(json_lines: bool) -> None:
    stream = io.StringIO()
    with log_to(stream, role="decode", json_lines=json_lines):
        error = RuntimeError("two\nlines")
        logger.error("peer said %s", "x\r\n2026 ERROR forged", exc_info=error)
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError" in line


def test_json_lines() -> None:
    stream = io.StringIO()
    with (
        log_to(stream, role="decode", level="debug", json_lines=True),
        Tracer().span("request", PARENT),
    ):
        logger.debug('say "é"')
    record = json.loads(stream.getvalue())
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "DEBUG",
        "role": "decode",
        "logger": "kvmesh.test",
        "message": 'say "é"',
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    }


def test_the_root_logger_is_left_as_it_was() -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with log_to(io.StringIO(), role="decode", level="debug"):
        assert root.level == logging.DEBUG
    assert (root.level, list(root.handlers)) == before


SECRET = "the prompt itself"


def fail(kind: type[Exception], cause: BaseException | None = None) -> None:
    raise kind(SECRET) from cause


def raised() -> ExceptionGroup[Exception]:
    """Return exceptions of every relation to each other, each with a prompt in its message."""
    found: list[Exception] = [InvalidRequestError(SECRET), EngineError("died")]
    try:
        try:
            fail(KeyError)
        except KeyError:
            fail(ValueError)
    except ValueError as cause:
        try:
            fail(RuntimeError, cause)
        except RuntimeError as error:
            error.add_note(SECRET)
            cause.__cause__ = error  # a circle ends, too
            found.append(error)
    return ExceptionGroup(SECRET, found)


@pytest.mark.parametrize("json_lines", [False, True])
def test_what_nobody_expected_is_logged_without_its_message(json_lines: bool) -> None:
    stream = io.StringIO()
    with log_to(stream, role="decode", level="debug", json_lines=json_lines):
        logger.error("failed", exc_info=raised())
    (line,) = stream.getvalue().splitlines()
    assert SECRET not in line
    for name in ("ExceptionGroup", "RuntimeError", "ValueError", "InvalidRequestError"):
        assert name in line
    assert "in fail" in line
    # Errors of ours say nothing of a prompt, unless they are about what a caller sent.
    assert "EngineError: died" in line


def test_messages_are_logged_where_they_are_asked_for() -> None:
    stream = io.StringIO()
    with log_to(stream, role="decode", messages=True):
        logger.error("failed", exc_info=raised())
    assert SECRET in stream.getvalue()
