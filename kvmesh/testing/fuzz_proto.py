"""Protobuf messages that nobody would send, as hypothesis strategies."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

MAX_REPEATED = 4
"""Entries of a repeated field, where a test says nothing else."""

MAX_CHARS = 40


@dataclass(frozen=True)
class Likely:
    """What messages are to hold, where that isn't anything at all. By fields' full names.

    `values`: of a field, of one entry where it is repeated, of a whole map. `always` are
    set, `never` are not.
    """

    values: Mapping[str, st.SearchStrategy[Any]] = field(default_factory=dict)
    always: Collection[str] = ()
    never: Collection[str] = ()


ANYTHING = Likely()

_INTEGERS: Mapping[int, tuple[int, int]] = {
    **dict.fromkeys((FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM), (-(2**31), 31)),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 63),
    FieldDescriptor.CPPTYPE_UINT32: (0, 32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 64),
}


def messages(descriptor: Descriptor, likely: Likely = ANYTHING) -> st.SearchStrategy[Any]:
    """Return a strategy of messages of a type: each field absent, odd or extreme."""
    kinds = {
        one.name: _field(one, likely)
        for one in descriptor.fields
        if one.full_name not in likely.never
    }
    always = {one.name for one in descriptor.fields if one.full_name in likely.always}
    return st.fixed_dictionaries(
        {name: kinds[name] for name in kinds if name in always},
        optional={name: kinds[name] for name in kinds if name not in always},
    ).map(lambda values: _build(descriptor, values))


@st.composite
def broken(draw: st.DrawFn, valid: st.SearchStrategy[Message]) -> bytes:
    """Return a strategy of bytes near a valid message: cut, spliced, flipped; or just bytes."""
    data = bytearray(draw(valid).SerializeToString())
    if not data or draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=64))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("cut", "flip", "insert", "drop", "repeat"))):
            case "cut":
                del data[at:]
            case "flip" if at < len(data):
                data[at] ^= draw(st.integers(1, 255))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "drop":
                del data[at : at + draw(st.integers(1, 8))]
            case _:
                data[at:at] = data[: draw(st.integers(0, 32))]
    return bytes(data)


def _field(one: FieldDescriptor, likely: Likely) -> st.SearchStrategy[Any]:
    kind = one.message_type
    if kind is not None and kind.GetOptions().map_entry:
        if one.full_name in likely.values:
            return likely.values[one.full_name]
        key, value = (_field(kind.fields_by_name[name], likely) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=MAX_REPEATED)
    name = one.full_name
    entry = likely.values[name] if name in likely.values else _value(one, likely)
    return st.lists(entry, max_size=MAX_REPEATED) if one.is_repeated else entry


def _value(one: FieldDescriptor, likely: Likely) -> st.SearchStrategy[Any]:
    if one.message_type is not None:
        return messages(one.message_type, likely)
    if one.cpp_type in _INTEGERS:
        low, bits = _INTEGERS[one.cpp_type]
        high = 2**bits - 1
        return st.sampled_from((0, 1, 2, low, high)) | st.integers(low, high)
    match one.type:
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=MAX_CHARS)
        case FieldDescriptor.TYPE_STRING:
            # Half surrogates can't be put into a message.
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_CHARS)
        case _:
            return st.floats(width=64 if one.type == FieldDescriptor.TYPE_DOUBLE else 32)


def _build(descriptor: Descriptor, values: Mapping[str, Any]) -> Any:
    """Return the message; of a oneof, the last one given stays."""
    message = message_factory.GetMessageClass(descriptor)()
    for name, value in values.items():
        if isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, Message):
            getattr(message, name).SetInParent()
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message
