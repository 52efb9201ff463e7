"""Settings of the simulated engine, and how an engine is chosen."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh import config
from kvmesh.clock import SystemClock
from kvmesh.engine.base import (
    AsyncEngine,
    KvEventSource,
    PrefillEngine,
    ResumeEngine,
    Seat,
    StepEngine,
)
from kvmesh.engine.factory import NAMES, EngineConfig, create
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.errors import InvalidRequestError
from kvmesh.models import read_info, tiny_folder
from kvmesh.types import Role


@pytest.fixture
def seat(tmp_path: Path) -> Seat:
    return Seat("w", "e", Role.DECODE, tiny_folder(tmp_path / "tiny"), "m")


def make(settings: EngineConfig, seat: Seat) -> AsyncEngine:
    return create(settings, seat, clock=SystemClock(), rng=random.Random(0))


def test_the_simulated_engine_has_every_part(seat: Seat) -> None:
    engine = make(EngineConfig(), seat)
    assert isinstance(engine, SimEngine)
    for part in (AsyncEngine, PrefillEngine, ResumeEngine, KvEventSource, StepEngine):
        assert isinstance(engine, part)


def test_an_unknown_engine_names_the_known(seat: Seat) -> None:
    with pytest.raises(InvalidRequestError, match=", ".join(NAMES)):
        make(EngineConfig(name="abacus"), seat)


def test_settings_nest() -> None:
    loaded = config.load(
        EngineConfig,
        argv=["--sim-latency-speed", "0", "--sim-block-size", "8"],
        environ={"KVMESH_SIM_FAULTS_SPOIL_BLOCKS": "2"},
        prog="test",
    )
    assert loaded.sim.latency.speed == 0
    assert (loaded.sim.block_size, loaded.sim.faults.spoil_blocks) == (8, 2)


@pytest.mark.parametrize(
    "flags", [["--sim-sample-from", "99999"], ["--sim-eos-token-id", "99999"], ["--name", "x"]]
)
def test_wrong_settings_are_config_errors(flags: list[str]) -> None:
    with pytest.raises(config.ConfigError):
        config.load(EngineConfig, argv=flags, environ={}, prog="test")


@pytest.mark.parametrize(
    "change",
    [{"block_size": 8}, {"seed": 1}, {"vocab_size": 999}, {"sample_from": 1}],
    ids=lambda change: next(iter(change)),
)
def test_fingerprints_tell_layouts_apart(change: dict[str, int]) -> None:
    plain = SimConfig()
    changed = replace(plain, **change)  # type: ignore[arg-type]
    assert changed.layout_fingerprint("m") != plain.layout_fingerprint("m")


def test_fingerprints_pass_over_what_may_differ() -> None:
    plain = SimConfig()
    assert plain.layout_fingerprint("m") != plain.layout_fingerprint("other")
    larger = replace(plain, total_blocks=9, lease_seconds=1.0)
    assert larger.layout_fingerprint("m") == plain.layout_fingerprint("m")


async def test_a_worker_keeps_to_its_models_vocabulary_and_context(seat: Seat) -> None:
    engine = make(EngineConfig(), seat)
    info = await engine.start()
    await engine.aclose()
    assert info.vocab_size == read_info(seat.model).vocab_size < SimConfig().vocab_size
    assert info.context_length <= read_info(seat.model).context_length
