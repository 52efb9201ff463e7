"""One request inside the torch engine, and how its tokens are to be picked. No torch here."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.engine.base import EngineRequest, StepSink
from kvmesh.engine.sequence import BatchSequence, Kind, Limits
from kvmesh.errors import EngineError
from kvmesh.types import KvTicket, Sampling

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Knobs:
    """How to pick tokens, every choice made. `top_k` 0 is all; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


def resolve(sampling: Sampling, defaults: Knobs) -> Knobs:
    """Return a request's knobs; those it leaves open are the model's."""

    def either(asked: float | None, default: float) -> float:
        return default if asked is None else asked

    top_k = defaults.top_k if sampling.top_k is None else max(sampling.top_k, 0)
    return Knobs(
        temperature=either(sampling.temperature, defaults.temperature),
        top_p=either(sampling.top_p, defaults.top_p),
        top_k=top_k,
        min_p=either(sampling.min_p, defaults.min_p),
        presence_penalty=either(sampling.presence_penalty, defaults.presence_penalty),
        frequency_penalty=either(sampling.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=either(sampling.repetition_penalty, defaults.repetition_penalty),
    )


def read_defaults(folder: Path) -> Knobs:
    """Return the knobs that a model's own generation_config.json sets.

    As vLLM does: temperature, top_p, top_k, min_p and repetition_penalty count, whether
    sampling is on there or not. Raises `EngineError` for a file that makes no sense.
    """
    path = folder / "generation_config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Knobs()
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise EngineError(f"{path} is no JSON object")
    # Sampling knows the ranges.
    asked = Sampling(
        temperature=_number(raw, "temperature"),
        top_p=_number(raw, "top_p"),
        top_k=_top_k(raw),
        min_p=_number(raw, "min_p"),
        repetition_penalty=_number(raw, "repetition_penalty"),
    )
    return resolve(asked, Knobs())


class TorchSequence(BatchSequence):
    """A `BatchSequence` with its knobs and its random stream.

    What is picked at a position depends on `seed`, the position and the tokens before it
    alone: a preemption or a hand-off changes nothing.
    """

    __slots__ = ("knobs", "seed")

    def __init__(
        self,
        request: EngineRequest,
        kind: Kind,
        ticket: KvTicket | None,
        sink: StepSink,
        limits: Limits,
    ) -> None:
        super().__init__(request, kind, ticket, sink, limits)
        self.knobs = Knobs()
        self.seed = 0

    def pick_with(self, defaults: Knobs, rng: random.Random) -> None:
        """Settle how this sequence's tokens are picked; `rng` gives a seed if none is asked."""
        sampling = self.request.sampling
        self.knobs = resolve(sampling, defaults)
        self.seed = rng.getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed


def _number(raw: Mapping[str, Any], key: str) -> float | None:
    value = raw.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _top_k(raw: Mapping[str, Any]) -> int | None:
    value = raw.get("top_k")
    return value if isinstance(value, int) and value != 0 else None
