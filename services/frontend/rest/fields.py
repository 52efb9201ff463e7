"""Strict reading of a JSON object: right type or an error that names the field.

Nothing is converted: `true` is no number, `"2"` is no integer, 1.0 neither. null is absent.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError

Object = Mapping[str, Any]


def parse(body: bytes) -> Object:
    """Return the object that a body holds.

    Refuses all that is not JSON: NaN, numbers beyond double, half surrogates, invalid
    UTF-8, more than a thousand levels.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(error)}") from error
    if not isinstance(document, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return document


class Fields:
    """One JSON object being read; `path` is put before the names in errors."""

    def __init__(self, document: Object, path: str = "") -> None:
        self.document = document
        self._path = path

    def name(self, name: str) -> str:
        """Return a field's full name."""
        return self._path + name

    def wrong(self, name: str, expected: str) -> InvalidRequestError:
        """Return the error that a field is not what it must be."""
        value = self.document.get(name)
        return InvalidRequestError(
            f"{self.name(name)} must be {expected}, got {json_type(value)}", field=self.name(name)
        )

    def string(self, name: str) -> str | None:
        """Return a string."""
        value = self.document.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def integer(self, name: str) -> int | None:
        """Return an integer."""
        value = self.document.get(name)
        if value is not None and type(value) is not int:
            raise self.wrong(name, "an integer")
        return value

    def number(self, name: str) -> float | None:
        """Return a number."""
        value = self.document.get(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise self.wrong(name, "a number")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.document.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "a boolean")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an array of integers; absent is empty."""
        value = self.document.get(name)
        if value is None:
            return ()
        if not is_list_of(value, int):
            raise self.wrong(name, "an array of integers")
        return tuple(value)

    def object(self, name: str) -> "Fields | None":
        """Return an object, to be read in its turn."""
        value = self.document.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.name(name)}.")


def is_list_of(value: object, kind: type) -> bool:
    """Return whether a value is an array of exactly this type throughout."""
    return isinstance(value, list) and all(type(item) is kind for item in value)


def json_type(value: object) -> str:
    """Return what JSON calls the type of a value, with the article."""
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in _TYPES:
        if isinstance(value, kind):
            return name
    return "null"


_TYPES: tuple[tuple[type, str], ...] = (
    (str, "a string"),
    (int, "an integer"),
    (float, "a number"),
    (list, "an array"),
    (dict, "an object"),
)


def _reason(error: orjson.JSONDecodeError) -> str:
    """Return what is wrong and where, without anything of the body."""
    return f"{error.msg.split(':')[0]} at line {error.lineno} column {error.colno}"
