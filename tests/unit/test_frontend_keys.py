"""Who may call."""

import hashlib

import pytest

from services.frontend.keys import Keys

KEYS = Keys(["sk-one", "ключ"])


@pytest.mark.parametrize(
    "value",
    [b"Bearer sk-one", b"bearer sk-one", b"BEARER  sk-one ", "Bearer ключ".encode()],
)
def test_a25_right_keys(value: bytes) -> None:
    assert KEYS.accept([value])


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"sk-one"],
        [b"Basic sk-one"],
        [b"Bearer sk-on"],
        [b"Bearer sk-one2"],
        [b"Bearer SK-ONE"],
        [b"Bearer sk-one sk-one"],
        [b"Bearer sk-one,x"],
        ["Bearer клю".encode()],
        ["Bearer ключ".encode("cp1251")],
        [b"Bearer \xff\x00"],
        [b"Bearer " + b"x" * 1_000_000],
        [b"Bearer sk-one", b"Bearer sk-one"],
        [b"Bearer wrong", b"Bearer sk-one"],
    ],
)
def test_a25_wrong_keys(values: list[bytes]) -> None:
    assert not KEYS.accept(values)


def test_without_keys_everybody_may_call() -> None:
    assert Keys([]).accept([])
    assert Keys([]).accept([b"x", b"y"])


def test_an_empty_key_lets_nobody_in() -> None:
    for value in (b"", b"Bearer", b"Bearer ", b"Bearer x"):
        assert not Keys([""]).accept([value])


def test_a_key_has_one_share_however_it_is_shown() -> None:
    shown = [[b"Bearer sk-one"], [b"bearer  sk-one "]]
    (share,) = {KEYS.fair_key(values) for values in shown}

    assert share == hashlib.sha256(b"sk-one").hexdigest()[:16]
    assert KEYS.fair_key(["Bearer ключ".encode()]) not in ("", share)


def test_where_everybody_may_call_all_share_alike() -> None:
    assert Keys([]).fair_key([b"Bearer sk-one"]) == ""
    assert KEYS.fair_key([]) == ""
