"""Sampling settings: what a request leaves open is the model's."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvmesh.engine.base import EngineRequest
from kvmesh.engine.sequence import Kind, Limits
from kvmesh.engine.torch.sequence import Knobs, TorchSequence, read_defaults, resolve
from kvmesh.errors import EngineError, InvalidRequestError
from kvmesh.types import Sampling


def folder(path: Path, value: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(value))
    return path


def test_defaults_are_the_models(tmp_path: Path) -> None:
    value = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": 2}
    assert read_defaults(folder(tmp_path, value)) == Knobs(temperature=0.6, top_p=0.9, top_k=40)


def test_without_a_file_all_is_neutral(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == Knobs()


@pytest.mark.parametrize("value", [{"top_k": 0}, {"top_k": None}, {"top_k": -1}])
def test_no_top_k_is_all(tmp_path: Path, value: dict[str, Any]) -> None:
    assert read_defaults(folder(tmp_path, value)).top_k == 0


@pytest.mark.parametrize("value", [[], "x"])
def test_nonsense_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(EngineError, match="no JSON object"):
        read_defaults(folder(tmp_path, value))


def test_a_default_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        read_defaults(folder(tmp_path, {"top_p": 7}))


def test_a11_zero_is_not_open() -> None:
    defaults = Knobs(0.6, 0.9, 40, 0.1, 0.2, 0.3, 1.1)
    assert resolve(Sampling(), defaults) == defaults
    asked = Sampling(
        temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
    )  # fmt: skip
    assert resolve(asked, defaults) == Knobs(temperature=0.0)


def test_a_seed_is_kept_or_drawn() -> None:
    limits = Limits(10, 100, frozenset((2,)), 10)

    def seeds(seed: int | None) -> list[int]:
        rng, found = random.Random(0), []
        for _ in range(2):
            request = EngineRequest("r", [1], Sampling(seed=seed))
            one = TorchSequence(request, Kind.GENERATE, None, lambda _: None, limits)
            one.pick_with(Knobs(), rng)
            found.append(one.seed)
        return found

    assert seeds(7) == [7, 7]
    assert seeds(-1) == [-1, -1]
    assert seeds(0) == [0, 0]
    assert len(set(seeds(None))) == 2
