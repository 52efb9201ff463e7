"""What may be changed while routers run, and the TOML document that says so. Pure.

Run as a module it edits such a document for the command line, which knows no service: a
JSON object with `document`, `set` and `unset` comes on standard input, the new document
goes to standard output.
"""

import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from kvmesh import values
from kvmesh.config import ConfigError, override, parse_setting
from services.router.admission import QueueConfig
from services.router.planner import RoutingConfig
from services.router.plugins import Policies

MAX_CHARS = 64 * 1024
"""A longer document is refused unread."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TuningConfig:
    """Where a router looks for settings that change while it runs."""

    file: str = field(
        default="",
        metadata={"help": "TOML file of changed settings; empty: kept where members are"},
    )


@dataclass(frozen=True, slots=True)
class Tunable:
    """The sections of a router's configuration that may change while it runs."""

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)


def read(base: Tunable, document: str, source: str) -> tuple[Tunable, Policies]:
    """Return `base` with what a document sets, and the policies that this names.

    It holds as a whole or not at all: raises ConfigError, by the rules of the start-up
    configuration.
    """
    if len(document) > MAX_CHARS:
        raise ConfigError(f"{source}: longer than {MAX_CHARS} characters")
    settings = override(base, document, source)
    return settings, Policies(settings.routing.policy, settings.routing.policy_by_model)


def edit(document: str, sets: Mapping[str, str], unset: Collection[str]) -> str:
    """Return a document with some settings changed and some taken out; "" if none is left.

    `unset` names settings or whole tables. Raises ConfigError for what `read` refuses.
    """
    found = dict(_settings(_parsed(document)))
    for key in unset:
        gone = [path for path in found if f"{'.'.join(path)}.".startswith(f"{key}.")]
        if not gone:
            raise ConfigError(f"{key}: is not set")
        for path in gone:
            del found[path]
    for key, text in sets.items():
        found[tuple(key.split("."))] = parse_setting(Tunable, key, text, "--set")
    edited = _written(found)
    read(Tunable(), edited, "the changed settings")
    return edited


def changes(base: Tunable, settings: Tunable) -> Iterator[str]:
    """Yield `key=value` for each setting that is not what it was at the start."""
    before = dict(_leaves(base))
    for path, value in _leaves(settings):
        if value != before[path]:
            yield f"{'.'.join(path)}={values.to_text(value)}"


def _parsed(document: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(document)
    except ValueError as error:
        raise ConfigError(f"what is set now is not valid TOML: {error}") from error


def _settings(table: Mapping[str, Any], at: Path = ()) -> Iterator[tuple[Path, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _settings(value, (*at, name))
        else:
            yield (*at, name), tuple(value) if isinstance(value, list) else value


def _leaves(config: Any, at: Path = ()) -> Iterator[tuple[Path, object]]:
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from _leaves(value, (*at, item.name))
        else:
            yield (*at, item.name), value


def _written(found: Mapping[Path, object]) -> str:
    lines: list[str] = []
    table: Path = ()
    for path in sorted(found, key=lambda path: (path[:-1], path)):
        if path[:-1] != table:
            table = path[:-1]
            lines += ["", f"[{_dotted(table)}]"]
        lines.append(f"{_dotted(path[-1:])} = {values.to_toml(found[path])}")
    return "\n".join(lines).lstrip("\n") + "\n" if lines else ""


def _dotted(path: Iterable[str]) -> str:
    return ".".join(name if _BARE.fullmatch(name) else json.dumps(name) for name in path)


def main() -> int:
    """Edit as standard input says; returns the exit code. An error goes to standard error."""
    asked = json.load(sys.stdin)
    try:
        sys.stdout.write(edit(asked["document"], asked["set"], asked["unset"]))
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
