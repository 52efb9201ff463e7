"""Reads compose files as `docker compose` does: interpolated, and laid over each other."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<empty>:)?-(?P<default>[^}]*))?\}")


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a `.env` file of plain NAME=value lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def variables_of(path: Path) -> dict[str, str]:
    """Return the variables that a compose file takes, with their defaults."""
    text = path.read_text(encoding="utf-8")
    return {match["name"]: match["default"] or "" for match in _VARIABLE.finditer(text)}


def load_compose(*paths: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return a compose document; later files are laid over the earlier ones."""
    document: dict[str, Any] = {}
    for path in paths:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
        document = _laid_over(document, _interpolated(read, environ))
    return document


def _interpolated(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, environ) for item in value]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        found = environ.get(match["name"])
        missing = found is None or (match["empty"] is not None and not found)
        return (match["default"] or "") if missing else str(found)

    return _VARIABLE.sub(replaced, value)


def _laid_over(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        common = {key: _laid_over(base[key], over[key]) for key in base.keys() & over.keys()}
        return {**base, **over, **common}
    if isinstance(base, list) and isinstance(over, list):
        return [*base, *over]
    return over
