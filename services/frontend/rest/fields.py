"""Strict reading of JSON: right type, or an error that names the field.

Nothing is converted: `true` is no number, `"2"` is no integer, 1.0 neither. null is absent.
What a field may hold is said once, as a `Field`: for reading, and for the documentation.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.sampling import SAMPLING_RANGES

Object = Mapping[str, Any]

TOKEN_IDS_END = 2**32


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of JSON: what errors call it, what is one, and how JSON Schema says so."""

    what: str
    fits: Callable[[Any], bool]
    schema: Object


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an object.

    `only`: the values that can be honoured; empty: all. `within`: the number of `Sampling`
    whose range this has, by default that of the same name. `limits` is JSON Schema that
    goes with the kind's. `inner`: fields of an object, or of each object in an array.
    """

    name: str
    kind: Kind
    text: str
    default: Any = None
    only: tuple[Any, ...] = ()
    required: bool = False
    within: str = ""
    limits: Object = field(default_factory=dict)
    inner: "tuple[Field, ...]" = ()

    def schema(self) -> dict[str, Any]:
        """Return the field as JSON Schema."""
        schema = {"description": self.text, **self.kind.schema}
        if self.inner:
            schema |= {"items": table(self.inner)} if self.kind is ARRAY else table(self.inner)
        schema |= _bounds(self.within or self.name, self.kind)
        schema |= self.limits
        if self.only:
            schema["enum"] = [*self.only]
        if self.required:
            return schema
        if self.default is not None:
            schema["default"] = self.default
        if "enum" in schema:
            schema["enum"] = [*schema["enum"], None]
        if isinstance(schema.get("type"), str):
            schema["type"] = [schema["type"], "null"]
        elif "anyOf" in schema:
            schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
        return schema


class Fields:
    """The fields that one kind of object may have."""

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.fields = fields
        self._by_name = {one.name: one for one in fields}
        self._required = tuple(one.name for one in fields if one.required)
        self._inner = {one.name: Fields(one.inner) for one in fields if one.kind is OBJECT}
        self._defaults = {one.name: one.default for one in fields}

    def read(self, document: Object, path: str = "") -> dict[str, Any]:
        """Return the value of every field, checked; `path` goes before names in errors.

        Absent fields have their default. Raises `InvalidRequestError`.
        """
        values = self._defaults.copy()
        for name, value in document.items():
            if value is not None:
                values[name] = self._checked(name, value, path)
        for name in self._required:
            if values[name] is None:
                raise invalid(path + name, "is required")
        return values

    def _checked(self, name: str, value: Any, path: str) -> Any:
        known = self._by_name.get(name)
        if known is None:
            short = (path + name)[:128]
            raise InvalidRequestError(f"{short!r} is not a known field", field=short)
        if not known.kind.fits(value):
            raise wrong(path + name, known.kind.what, value)
        if known.only and not any(_same(value, one) for one in known.only):
            raise invalid(path + name, f"can't be honoured but as {_listed(known.only)}")
        if known.inner and known.kind is OBJECT:
            return self._inner[name].read(value, f"{path}{name}.")
        return value


def invalid(name: str, problem: str) -> InvalidRequestError:
    """Return the error that a field has some problem."""
    return InvalidRequestError(f"{name} {problem}", field=name)


def wrong(name: str, expected: str, value: object) -> InvalidRequestError:
    """Return the error that a field is not what it must be."""
    return invalid(name, f"must be {expected}, got {json_type(value)}")


def table(fields: tuple[Field, ...]) -> dict[str, Any]:
    """Return the JSON Schema of an object that has these fields and no others."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {one.name: one.schema() for one in fields},
        "additionalProperties": {"type": "null"},  # null is the same as absent
    }
    required = [one.name for one in fields if one.required]
    return {**schema, "required": required} if required else schema


def is_list_of(value: object, kind: type) -> bool:
    """Return whether a value is an array of exactly this type throughout."""
    return isinstance(value, list) and set(map(type, value)) <= {kind}


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

STRING = Kind("a string", lambda v: isinstance(v, str), {"type": "string"})
INTEGER = Kind("an integer", lambda v: type(v) is int, {"type": "integer"})
NUMBER = Kind("a number", lambda v: type(v) in (int, float), {"type": "number"})
BOOLEAN = Kind("a boolean", lambda v: isinstance(v, bool), {"type": "boolean"})
OBJECT = Kind("an object", lambda v: isinstance(v, dict), {"type": "object"})
ARRAY = Kind("an array", lambda v: isinstance(v, list), {"type": "array"})

_TOKEN_IDS: Object = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": TOKEN_IDS_END},
}

TOKEN_IDS = Kind("an array of integers", lambda v: is_list_of(v, int), _TOKEN_IDS)

STRINGS = Kind(
    "a string or an array of strings",
    lambda v: isinstance(v, str) or is_list_of(v, str),
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
)

WORDS = Kind(
    "an array of strings",
    lambda v: is_list_of(v, str),
    {"type": "array", "items": {"type": "string", "minLength": 1}},
)

CONTENT = Kind(
    "a string or an array of parts",
    lambda v: isinstance(v, str) or (isinstance(v, list) and bool(v)),
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Part"}},
        ]
    },
)

PROMPTS = Kind(
    "a string, an array of token ids, or an array of either",
    lambda v: isinstance(v, (str, list)),
    {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            {**_TOKEN_IDS, "minItems": 1},
            {"type": "array", "minItems": 1, "items": {**_TOKEN_IDS, "minItems": 1}},
        ]
    },
)

BIASES = Kind(
    "an object of numbers",
    lambda v: isinstance(v, dict) and set(map(type, v.values())) <= {int, float},
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
)


def one_of(*names: str) -> Kind:
    """Return the kind of a string that is one of these."""
    return Kind(
        f"one of {', '.join(names)}",
        lambda v: isinstance(v, str) and v in names,
        {"type": "string", "enum": [*names]},
    )


def _bounds(name: str, kind: Kind) -> dict[str, Any]:
    if kind not in (INTEGER, NUMBER) or name not in SAMPLING_RANGES:
        return {}
    low, high, _ = SAMPLING_RANGES[name]
    least = {"exclusiveMinimum": 0} if 0 < low < 1 else {"minimum": low}
    return {**least, "maximum": high}


def _same(value: object, one: object) -> bool:
    return value == one and isinstance(value, bool) == isinstance(one, bool)


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(re.sub(r"'", '"', str(value)) for value in map(_word, values))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
