"""Values of settings: to and from text, and to and from TOML.

A kind is str, int, float, bool, Path, an enum, or `tuple[kind, ...]`. All raise
ValueError with a message that goes on from the value: "is not an integer".
"""

import json
import math
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def from_text(kind: Any, text: str) -> object:
    """Return the value that `text`, from a flag or a variable, means for `kind`."""
    if typing.get_origin(kind) is tuple:
        return tuple(from_text(typing.get_args(kind)[0], part) for part in _split(text))
    if kind is bool:
        word = text.lower()
        if word not in _TRUE | _FALSE:
            raise ValueError("is not a boolean: use true or false")
        return word in _TRUE
    if issubclass(kind, Enum):
        return _member(kind, text)
    try:
        return kind(text)
    except ValueError:
        raise ValueError(_expected(kind)) from None


def from_toml(kind: Any, value: object) -> object:
    """Return the value that a parsed TOML value means for `kind`; types must match."""
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError("is not a list")
        return tuple(from_toml(typing.get_args(kind)[0], part) for part in value)
    if issubclass(kind, Enum):
        return _member(kind, value)
    accepted = {float: (int, float), Path: (str,)}.get(kind, (kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(_expected(kind))
    try:
        return kind(value)
    except OverflowError:
        raise ValueError("is too large") from None


def to_text(value: object) -> str:
    """Return the text that `from_text` reads back as `value`; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        parts = [to_text(part) for part in value]
        joined = ",".join(parts)
        plain = not joined.startswith("[") and _split(joined) == parts
        return joined if plain else json.dumps(parts)
    return str(value)


def to_toml(value: object) -> str:
    """Return a value as it is written in TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(to_toml(part) for part in value)}]"
    if isinstance(value, Enum):
        return to_toml(value.value)
    if isinstance(value, (bool, int, float)):
        return to_text(value)
    # JSON's strings are TOML's, but for the one control character that JSON leaves as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def check_limits(value: Any, metadata: Mapping[str, Any]) -> None:
    """Check `min`, `max` and `choices` of a value, of each part if it is a tuple."""
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, float) and not math.isfinite(part):
            raise ValueError("is not a finite number")
        if "min" in metadata and part < metadata["min"]:
            raise ValueError(f"is less than {metadata['min']}")
        if "max" in metadata and part > metadata["max"]:
            raise ValueError(f"is more than {metadata['max']}")
        if "choices" in metadata and part not in metadata["choices"]:
            raise ValueError("is not one of " + ", ".join(map(str, metadata["choices"])))


def _split(text: str) -> list[str]:
    """Split a comma-separated list, or a JSON list of strings."""
    if text.startswith("["):
        try:
            return [str(part) for part in json.loads(text)]
        except ValueError:
            raise ValueError("is not a list: use a,b,c or JSON") from None
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _member(kind: type[Enum], value: object) -> Enum:
    for member in kind:
        if member.value == value or str(member.value) == value:
            return member
    raise ValueError("is not one of " + ", ".join(str(member.value) for member in kind))


def _expected(kind: type) -> str:
    names = {int: "an integer", float: "a number", bool: "a boolean"}
    return f"is not {names.get(kind, 'a string')}"
