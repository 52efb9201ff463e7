"""Configuration: defaults < TOML file < environment < flags, into frozen dataclasses.

A component owns its section, a frozen dataclass; a process composes sections into
one. For the field `block_size` of the section `sim` in the section `engine` the
TOML key is `engine.sim.block_size`, the variable KVMESH_ENGINE_SIM_BLOCK_SIZE and
the flag `--engine-sim-block-size`. Fields may be str, int, float, bool, Path, an
enum, `tuple[str, ...]` (or of another scalar), or one of these `| None`. Field
metadata: `help`, `secret` (never shown), `min`, `max`, `choices`.

This module is the only reader of the process's environment and command line.
"""

import argparse
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvmesh import values
from kvmesh.errors import MeshError, Reason

T = TypeVar("T")

PREFIX = "KVMESH_"
CONFIG_VARIABLE = "KVMESH_CONFIG"
MASK = "***"

# Kubernetes sets these for a service that is called kvmesh-<section>; they aren't ours.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP)(_\w+)?)$")


class ConfigError(MeshError):
    """A setting is wrong. The message names key, value and source, never a secret."""

    reason = Reason.INVALID_ARGUMENT


def load(
    cls: type[T],
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    prog: str,
    description: str = "",
    foreign: Collection[str] = (),
) -> T:
    """Return the effective configuration.

    `argv` has no program name. `foreign` names TOML tables that belong to other
    processes and are passed over, so that one file can serve a whole mesh. Raises
    ConfigError for a wrong value, an unknown key of the file, an unknown variable of
    a known section or an unknown flag. `--help` and `--print-config` print to
    standard output and raise SystemExit(0).
    """
    leaves = tuple(_leaves(cls))
    flags = vars(_parser(leaves, prog, description).parse_args(list(argv)))
    path = flags.pop("--config", None) or environ.get(CONFIG_VARIABLE)
    found: dict[tuple[str, ...], object] = {leaf.path: leaf.default for leaf in leaves}
    if path:
        found |= _from_file(leaves, Path(path), foreign)
    found |= _from_environ(leaves, environ)
    found |= {
        leaf.path: leaf.parse(flags[leaf.flag], f"flag {leaf.flag}")
        for leaf in leaves
        if leaf.flag in flags
    }
    config: T = _build(cls, found)
    if flags.get("--print-config"):
        sys.stdout.write(to_toml(config))
        raise SystemExit(0)
    return config


def load_or_exit(
    cls: type[T], *, prog: str, description: str = "", foreign: Collection[str] = ()
) -> T:
    """Load from this process's own command line and environment, for a `main`.

    A wrong setting is written to standard error and exits with status 2.
    """
    try:
        return load(
            cls,
            argv=sys.argv[1:],
            environ=environment(),
            prog=prog,
            description=description,
            foreign=foreign,
        )
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        raise SystemExit(2) from None


def override(base: T, document: str, source: str) -> T:
    """Return `base` with what a TOML document sets. Raises ConfigError as `load` does."""
    leaves = tuple(_leaves(type(base), base=base))
    found = {leaf.path: leaf.default for leaf in leaves}
    changed: T = _build(type(base), found | _from_document(leaves, document, source, ()))
    return changed


def parse_setting(cls: type, key: str, text: str, source: str) -> object:
    """Return what `text` means for one setting of a dataclass. Raises ConfigError."""
    for leaf in _leaves(cls):
        if leaf.key == key:
            return leaf.parse(text, source)
    raise ConfigError(f"{key}: unknown key (from {source})")


def environment() -> dict[str, str]:
    """Return a copy of the process's environment as it is now."""
    return dict(os.environ)  # noqa: TID251 - this is where the ban leads


def to_env(config: object) -> dict[str, str]:
    """Return variables that make another process load this configuration.

    Every field is in it, defaults and secrets too, so that what the child inherits
    otherwise doesn't matter.
    """
    return {
        leaf.variable: values.to_text(_value(config, leaf.path)) for leaf in _leaves(type(config))
    }


def to_flags(overrides: Mapping[str, object]) -> list[str]:
    """Return flags for settings such as `{"router.port": 7000}`, in their order.

    Keys are TOML keys. They are checked by the process that gets them.
    """
    return [_flag(key, value) for key, value in overrides.items()]


def to_toml(config: object) -> str:
    """Return the configuration as a TOML file.

    What is unset or secret stands in a comment, so the file can be loaded again.
    """
    lines: list[str] = []
    table: tuple[str, ...] = ()
    leaves = tuple(_leaves(type(config)))
    tables = [(), *dict.fromkeys(leaf.path[:-1] for leaf in leaves)]
    for leaf in sorted(leaves, key=lambda leaf: tables.index(leaf.path[:-1])):
        if leaf.path[:-1] != table:
            table = leaf.path[:-1]
            lines += ["", f"[{'.'.join(table)}]"]
        value = _value(config, leaf.path)
        if value is None:
            lines.append(f"# {leaf.path[-1]} is not set")
        elif leaf.secret and value:
            lines.append(f'# {leaf.path[-1]} = "{MASK}"')
        else:
            lines.append(f"{leaf.path[-1]} = {values.to_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One setting. `kind` is its type without `| None`."""

    path: tuple[str, ...]
    kind: Any
    optional: bool
    default: object
    metadata: Mapping[str, Any]

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        return PREFIX + "_".join(self.path).upper()

    @property
    def flag(self) -> str:
        return _flag_name(self.key)

    @property
    def secret(self) -> bool:
        return bool(self.metadata.get("secret"))

    def parse(self, text: str, source: str) -> object:
        """Turn text into a checked value."""
        if self.optional and text == "":
            return None
        return self._checked(text, source, values.from_text)

    def accept(self, value: object, source: str) -> object:
        """Turn a TOML value into a checked value."""
        return self._checked(value, source, values.from_toml)

    def _checked(self, raw: Any, source: str, convert: Callable[[Any, Any], object]) -> object:
        try:
            value = convert(self.kind, raw)
            values.check_limits(value, self.metadata)
        except ValueError as error:
            shown = MASK if self.secret else repr(raw)
            raise ConfigError(f"{self.key}: {shown} {error} (from {source})") from None
        return value


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as ConfigError."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        raise ConfigError(f"unknown flag: {unknown}" if unknown != message else message)


def _leaves(cls: Any, at: tuple[str, ...] = (), base: object = MISSING) -> Iterator[_Leaf]:
    """Yield the settings of a dataclass in the order of its fields."""
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        if not item.init:
            continue
        path = (*at, item.name)
        default = _default(item) if base is MISSING else getattr(base, item.name)
        kind, optional = _without_none(hints[item.name])
        if is_dataclass(kind):
            yield from _leaves(kind, path, default)
        else:
            _check_supported(path, kind)
            yield _Leaf(path, kind, optional, default, item.metadata)


def _default(item: Field[Any]) -> object:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return (kinds[0] if len(kinds) == 1 else hint), len(kinds) < len(typing.get_args(hint))


def _check_supported(path: tuple[str, ...], kind: Any) -> None:
    args = typing.get_args(kind)
    scalar = args[0] if typing.get_origin(kind) is tuple and args[1:] == (...,) else kind
    if not isinstance(scalar, type) or not issubclass(scalar, (str, int, float, Path, Enum)):
        raise TypeError(f"{'.'.join(path)}: settings can't be of type {kind}")


def _parser(leaves: Sequence[_Leaf], prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    absent: Any = argparse.SUPPRESS
    parser.add_argument(
        "--config",
        dest="--config",
        default=absent,
        metavar="FILE",
        help=f"TOML file with settings [{CONFIG_VARIABLE}]",
    )
    parser.add_argument(
        "--print-config",
        dest="--print-config",
        default=absent,
        action="store_true",
        help="print the effective settings as TOML, secrets masked, and exit",
    )
    seen: set[str] = {CONFIG_VARIABLE, PREFIX + "PRINT_CONFIG"}
    for leaf in leaves:
        if leaf.variable in seen:
            raise TypeError(f"{leaf.key}: another setting is called {leaf.variable} too")
        seen.add(leaf.variable)
        _add_flag(parser, leaf)
    return parser


def _add_flag(parser: argparse.ArgumentParser, leaf: _Leaf) -> None:
    absent: Any = argparse.SUPPRESS
    text = _help(leaf)
    if leaf.kind is bool:
        off = "--no-" + leaf.flag.removeprefix("--")
        parser.add_argument(
            leaf.flag, dest=leaf.flag, action="store_const", const="true", default=absent, help=text
        )
        parser.add_argument(
            off, dest=leaf.flag, action="store_const", const="false", default=absent, help=absent
        )
    else:
        name = leaf.path[-1].upper()
        parser.add_argument(leaf.flag, dest=leaf.flag, default=absent, metavar=name, help=text)


def _help(leaf: _Leaf) -> str:
    notes = [leaf.variable]
    choices = leaf.metadata.get("choices")
    if isinstance(leaf.kind, type) and issubclass(leaf.kind, Enum):
        choices = [member.value for member in leaf.kind]
    if choices:
        notes.append("one of " + ", ".join(str(choice) for choice in choices))
    if leaf.default is MISSING:
        notes.append("required")
    elif leaf.default is not None and not leaf.secret:
        notes.append(f"default {values.to_text(leaf.default) or 'empty'}")
    return f"{leaf.metadata.get('help', '')} [{'; '.join(notes)}]".strip().replace("%", "%%")


def _from_file(
    leaves: Sequence[_Leaf], path: Path, foreign: Collection[str]
) -> dict[tuple[str, ...], object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    return _from_document(leaves, text, f"file {path}", foreign)


def _from_document(
    leaves: Sequence[_Leaf], text: str, source: str, foreign: Collection[str]
) -> dict[tuple[str, ...], object]:
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    known = {leaf.path: leaf for leaf in leaves}
    tables = {leaf.path[:depth] for leaf in leaves for depth in range(1, len(leaf.path))}
    found: dict[tuple[str, ...], object] = {}

    def visit(table: Mapping[str, Any], at: tuple[str, ...]) -> None:
        for name, value in table.items():
            here = (*at, name)
            if here in known:
                found[here] = known[here].accept(value, source)
            elif here in tables and isinstance(value, dict):
                visit(value, here)
            elif at or name not in foreign:
                shown = "a table" if isinstance(value, dict) else repr(value)
                raise ConfigError(f"{'.'.join(here)}: unknown key, set to {shown} (from {source})")

    visit(document, ())
    return found


def _from_environ(
    leaves: Sequence[_Leaf], environ: Mapping[str, str]
) -> dict[tuple[str, ...], object]:
    known = {leaf.variable: leaf for leaf in leaves}
    sections = tuple({f"{PREFIX}{leaf.path[0].upper()}_" for leaf in leaves if len(leaf.path) > 1})
    found: dict[tuple[str, ...], object] = {}
    for name, text in environ.items():
        leaf = known.get(name)
        if leaf is not None:
            found[leaf.path] = leaf.parse(text, f"environment variable {name}")
        elif name.startswith(sections) and not _SERVICE_LINK.search(name):
            # Its value isn't shown: it may be a secret whose name was mistyped.
            raise ConfigError(f"{name}: unknown setting (from environment variable {name})")
    return found


def _build(cls: Any, found: Mapping[tuple[str, ...], object], at: tuple[str, ...] = ()) -> Any:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, object] = {}
    for item in fields(cls):
        if not item.init:
            continue
        path = (*at, item.name)
        nested = is_dataclass(hints[item.name])
        value = _build(hints[item.name], found, path) if nested else found[path]
        if value is MISSING:
            key = ".".join(path)
            raise ConfigError(
                f"{key}: required, set {_flag_name(key)} or {PREFIX}{'_'.join(path).upper()}"
            )
        arguments[item.name] = value
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ConfigError(f"{'.'.join(at) or cls.__name__}: {error}") from error


def _value(config: object, path: tuple[str, ...]) -> object:
    for name in path:
        config = getattr(config, name)
    return config


def _flag_name(key: str) -> str:
    return "--" + key.replace(".", "-").replace("_", "-")


def _flag(key: str, value: object) -> str:
    name = _flag_name(key)
    if isinstance(value, bool):
        return name if value else "--no-" + name.removeprefix("--")
    return f"{name}={values.to_text(value)}"
