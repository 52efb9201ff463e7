"""JSON bodies: strict reading, and passing on what belongs to others as it was written."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidRequestError
from services.frontend.rest.body import MAX_DEPTH, items, members, parse
from services.frontend.rest.fields import ARRAY, BOOLEAN, INTEGER, OBJECT, Field, Fields, table

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nope",
        b"[]",
        b'"x"',
        b"null",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"a": -Infinity}',
        b'{"a": "\\ud83d"}',
        b'{"a": "\\udc00x"}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\xbd"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"a": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"[" * 100_000,
        b"\x1f\x8b\x08\x00",
        b'{"a": 1} x',
        b'{"a": 1,}',
    ],
)
def test_a02_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="body"):
        parse(body)


def test_a02_depth_is_counted_exactly() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)

    parse(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequestError, match="deeper"):
        parse(nested(MAX_DEPTH + 1))
    parse(json.dumps({"many": [{}] * 1000}).encode())


def test_a_wrong_body_is_not_quoted() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(b'{"secret": secret}')
    assert "secret" not in caught.value.message


@given(st.dictionaries(st.text(), JSON, max_size=5), st.sampled_from([None, 0, 2]))
def test_a19_members_are_what_was_written(document: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=indent is None)
    found = members(text)
    assert {name: json.loads(value) for name, value in found.items()} == document
    assert list(found) == list(document)
    assert all(value in text for value in found.values())


@given(st.lists(JSON, max_size=5), st.sampled_from([None, 0, 2]))
def test_a19_items_are_what_was_written(array: list[Any], indent: int | None) -> None:
    text = json.dumps(array, indent=indent)
    found = items(text)
    assert [json.loads(value) for value in found] == array
    assert all(value in text for value in found)


@pytest.mark.parametrize(
    "value",
    [
        "9007199254740993",
        "18446744073709551616",
        "1" * 300,
        "1.0",
        "5e0",
        "0.1000000000000000055511151231257827",
        "-0.0",
        '{"b":1, "a":2}',
        '{"minLength":5,"enum":[1,2,3]}',
        '"\\u00e9 \\/ \\u2028"',
        "[ ]",
    ],
)
def test_a19_numbers_and_order_stay_as_they_were(value: str) -> None:
    body = parse(f'{{"x": 1, "tools" :\n[{value}]\t, "y": 2}}'.encode())
    assert body.written("tools") == f"[{value}]"


def test_a19_the_last_of_a_name_counts_in_both_readings() -> None:
    body = parse(b'{"a": 1, "a": {"b": 2}}')
    assert (body.values["a"], body.written("a")) == ({"b": 2}, '{"b": 2}')


INNER = (Field("deep", BOOLEAN, "Deep.", False),)
FIELDS = Fields(
    (
        Field("count", INTEGER, "Count.", 3),
        Field("only", INTEGER, "Only.", only=(1, 2)),
        Field("inner", OBJECT, "Inner.", inner=INNER),
        Field("needed", ARRAY, "Needed.", required=True),
    )
)


def test_defaults_and_nulls() -> None:
    values = FIELDS.read({"needed": [], "count": None, "unheard_of": None})
    assert values == {"count": 3, "only": None, "inner": None, "needed": []}
    assert FIELDS.read({"needed": [], "inner": {}})["inner"] == {"deep": False}


@pytest.mark.parametrize(
    ("document", "field", "words"),
    [
        ({"needed": [], "count": True}, "count", "an integer, got a boolean"),
        ({"needed": [], "count": 1.0}, "count", "an integer, got a number"),
        ({"needed": [], "count": "2"}, "count", "an integer, got a string"),
        ({"needed": [], "only": 3}, "only", "1 or 2"),
        ({"needed": [], "only": True}, "only", "an integer"),
        ({"needed": [], "inner": {"deep": 1}}, "inner.deep", "a boolean"),
        ({"needed": [], "inner": {"x": 1}}, "inner.x", "not a known field"),
        ({"needed": [], "other": 0}, "other", "not a known field"),
        ({}, "needed", "required"),
        ({"needed": None}, "needed", "required"),
    ],
)
def test_what_is_wrong_is_named(document: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        FIELDS.read(document)
    assert caught.value.field == field


def test_long_names_are_cut() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        FIELDS.read({"needed": [], "x" * 1_000_000: 1})
    assert len(caught.value.message) < 200
    assert len(caught.value.field or "") < 200


def test_the_schema_says_the_same() -> None:
    schema = table(FIELDS.fields)
    assert schema["required"] == ["needed"]
    assert schema["additionalProperties"] == {"type": "null"}
    assert schema["properties"]["count"]["type"] == ["integer", "null"]
    assert schema["properties"]["count"]["default"] == 3
    assert schema["properties"]["only"]["enum"] == [1, 2, None]
    assert list(schema["properties"]["inner"]["properties"]) == ["deep"]
