"""Errors over the wire and back."""

import pytest

from kvmesh import errors
from kvmesh.errors import MeshError, Reason
from kvmesh.rpc.status import MAX_MESSAGE_CHARS, TABLE, from_status, to_status

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MeshError) and kind is not MeshError
]


def test_every_reason_has_a_row_and_a_class() -> None:
    assert set(TABLE) == set(Reason) == {kind.reason for kind in CLASSES}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_arrives_as_what_it_was_raised_as(kind: type[MeshError]) -> None:
    got = from_status(to_status(kind("what", field="sampling.seed", retry_after=1.5)))
    assert type(got) is kind
    assert (got.message, got.field, got.retry_after) == ("what", "sampling.seed", 1.5)


def test_absent_details_arrive_absent() -> None:
    got = from_status(to_status(errors.UnavailableError("gone")))
    assert (got.field, got.retry_after) == (None, None)


def test_a27_long_text_is_cut_below_what_trailers_hold() -> None:
    status = to_status(errors.InvalidRequestError("x" * 20_000, field="f"))
    assert len(status.message) == MAX_MESSAGE_CHARS
    assert status.ByteSize() < 4096


def test_a_reason_from_the_future_is_an_internal_error() -> None:
    status = to_status(errors.UnavailableError("gone"))
    status.details[0].value = status.details[0].value.replace(b"UNAVAILABLE", b"NEWER_THING")
    assert type(from_status(status)) is errors.InternalError
