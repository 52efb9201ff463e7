"""A request's body: the JSON object that it holds, as values and as it was written."""

import json
import re
from functools import cached_property
from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError

MAX_DEPTH = 64
"""Arrays and objects in each other: more than tools' schemas need, less than any parser's stack."""

# Numbers are not read: as text they cost nothing, however many digits they have.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
_SPACE = re.compile(r"[ \t\n\r]*")


class Body:
    """A JSON object. `written` is for what belongs to somebody else and is passed on."""

    def __init__(self, values: dict[str, Any], raw: bytes) -> None:
        self.values = values
        self._raw = raw

    def written(self, name: str) -> str:
        """Return a member as the client wrote it: its numbers and its order are kept."""
        return self._members[name]

    @cached_property
    def _members(self) -> dict[str, str]:
        return members(self._raw.decode())


def parse(raw: bytes) -> Body:
    """Return the object that a body holds.

    Refuses all that is not JSON: NaN, numbers beyond double, half surrogates, invalid
    UTF-8; and more than `MAX_DEPTH` levels.
    """
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(error)}") from error
    if not isinstance(document, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        _check_depth(document)
    return Body(document, raw)


def members(text: str) -> dict[str, str]:
    """Return the values of a JSON object, known to be valid, as they are written."""
    found: dict[str, str] = {}
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, text.index(":", at) + 1)
        end = _DECODER.raw_decode(text, at)[1]
        found[name] = text[at:end]
        at = _next(text, end)
    return found


def items(text: str) -> list[str]:
    """Return the items of a JSON array, known to be valid, as they are written."""
    found: list[str] = []
    at = _skip(text, text.index("[") + 1)
    while text[at] != "]":
        end = _DECODER.raw_decode(text, at)[1]
        found.append(text[at:end])
        at = _next(text, end)
    return found


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _next(text: str, end: int) -> int:
    """Return where the next member begins, or the bracket that closes them."""
    at = _skip(text, end)
    return _skip(text, at + 1) if text[at] == "," else at


def _check_depth(document: dict[str, Any]) -> None:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _reason(error: orjson.JSONDecodeError) -> str:
    """Return what is wrong and where, without anything of the body."""
    return f"{error.msg.split(':')[0]} at line {error.lineno} column {error.colno}"
