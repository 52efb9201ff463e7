"""What a model folder says of itself, read from its JSON files alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.errors import MeshError, Reason


class ModelError(MeshError):
    """A model folder is missing, incomplete or can't be made."""

    reason = Reason.INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of a model that the mesh needs.

    `name` is the folder's. `context_length` is in tokens. `eos_token_ids` holds every
    token that ends a sequence, the configuration's own first; it may be empty.
    """

    name: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def read_info(path: Path) -> ModelInfo:
    """Read a model folder's facts. Raises `ModelError` naming what is missing."""
    config = _read(path, "config.json")
    text = config.get("text_config", config)  # models that also see or hear nest theirs
    if not isinstance(text, dict):
        raise ModelError(f"{path / 'config.json'}: text_config is no object")
    generation = _read(path, "generation_config.json", missing_ok=True)
    ends = [*_ids(text.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    return ModelInfo(
        name=path.resolve().name,
        context_length=_count(path, text, "max_position_embeddings"),
        vocab_size=_count(path, text, "vocab_size"),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def _read(path: Path, name: str, *, missing_ok: bool = False) -> dict[str, Any]:
    try:
        value = json.loads((path / name).read_bytes())
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise ModelError(f"{path} is no model folder: it has no {name}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / name} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path / name} is no JSON object")
    return value


def _count(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{path / 'config.json'}: {key} is missing or no positive number")
    return value


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int)]
