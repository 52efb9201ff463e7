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
    StepEngine,
)
from kvmesh.engine.factory import NAMES, EngineConfig, create
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.engine.vllm.settings import Seat
from kvmesh.errors import InvalidRequestError
from kvmesh.types import Role

SEAT = Seat(worker_id="w", epoch="e", role=Role.DECODE, model=Path("nowhere"), name="m")


def make(settings: EngineConfig) -> AsyncEngine:
    return create(settings, SEAT, clock=SystemClock(), rng=random.Random(0))


def test_the_simulated_engine_has_every_part() -> None:
    engine = make(EngineConfig())
    assert isinstance(engine, SimEngine)
    for part in (AsyncEngine, PrefillEngine, ResumeEngine, KvEventSource, StepEngine):
        assert isinstance(engine, part)


def test_an_unknown_engine_names_the_known() -> None:
    with pytest.raises(InvalidRequestError, match=", ".join(NAMES)):
        make(EngineConfig(name="abacus"))


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
