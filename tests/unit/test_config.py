"""Configuration: what wins, what is refused, and what a child process gets."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh import config


class Policy(StrEnum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


@dataclass(frozen=True)
class Sim:
    block_size: int = field(default=16, metadata={"help": "tokens, 100% of them", "min": 1})
    speed: float = field(default=1.0, metadata={"max": 10})


@dataclass(frozen=True)
class Engine:
    name: str = field(default="sim", metadata={"choices": ("sim", "vllm")})
    sim: Sim = field(default_factory=lambda: Sim(block_size=32))
    cache: Path | None = None


@dataclass(frozen=True)
class Consul:
    token: str = field(default="", metadata={"secret": True})
    tags: tuple[str, ...] = ()
    ports: tuple[int, ...] = field(default=(), metadata={"min": 1})
    enabled: bool = False
    limit: int | None = None


@dataclass(frozen=True)
class Service:
    name: str = "a"
    engine: Engine = field(default_factory=Engine)
    consul: Consul = field(default_factory=Consul)
    policy: Policy = Policy.ROUND_ROBIN


def load(
    argv: Sequence[str] = (), environ: Mapping[str, str] | None = None, foreign: Sequence[str] = ()
) -> Service:
    return config.load(Service, argv=argv, environ=environ or {}, prog="kvmesh", foreign=foreign)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return str(path)


def test_defaults_of_the_section_win_over_those_of_its_class() -> None:
    assert load() == Service()
    assert load().engine.sim.block_size == 32


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    path = written(tmp_path, "[engine.sim]\nblock_size = 1\nspeed = 2\n[consul]\ntags = ['x']\n")
    environ = {"KVMESH_ENGINE_SIM_BLOCK_SIZE": "2", "KVMESH_CONFIG": path, "KVMESH_NAME": "b"}
    got = load(["--engine-sim-block-size", "3"], environ)
    assert got.engine.sim == Sim(block_size=3, speed=2.0)
    assert got.consul.tags == ("x",)
    assert got.name == "b"
    assert load([], environ).engine.sim.block_size == 2
    assert load(["--config", path]).engine.sim.block_size == 1


def test_the_flag_for_the_file_wins_over_the_variable(tmp_path: Path) -> None:
    path = written(tmp_path, "name = 'flag'")
    assert load(["--config", path], {"KVMESH_CONFIG": "/nowhere"}).name == "flag"


@pytest.mark.parametrize(
    ("argv", "section"),
    [
        (["--consul-enabled"], Consul(enabled=True)),
        (["--consul-enabled", "--no-consul-enabled"], Consul(enabled=False)),
        (["--consul-tags", "a, b"], Consul(tags=("a", "b"))),
        (["--consul-tags", '["a,b", ""]'], Consul(tags=("a,b", ""))),
        (["--consul-tags="], Consul()),
        (["--consul-ports", "1,2"], Consul(ports=(1, 2))),
        (["--consul-limit", "7"], Consul(limit=7)),
        (["--consul-limit="], Consul(limit=None)),
    ],
)
def test_flags(argv: list[str], section: Consul) -> None:
    assert load(argv).consul == section


@pytest.mark.parametrize("word", ["true", "1", "YES", "on"])
def test_booleans_of_the_environment(word: str) -> None:
    assert load([], {"KVMESH_CONSUL_ENABLED": word}).consul.enabled is True


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["--engine-sim-block-size", "x"], {}, ["engine.sim.block_size", "'x'", "integer", "--en"]),
        (["--engine-sim-block-size", "0"], {}, ["engine.sim.block_size", "less than 1"]),
        (["--engine-sim-speed", "11"], {}, ["engine.sim.speed", "more than 10"]),
        (["--engine-sim-speed", "nan"], {}, ["engine.sim.speed", "finite"]),
        (["--engine-name", "gpt"], {}, ["engine.name", "'gpt'", "sim, vllm"]),
        (["--policy", "best"], {}, ["policy", "'best'", "round_robin, least_loaded"]),
        (["--consul-ports", "1,0"], {}, ["consul.ports", "less than 1"]),
        (["--consul-tags", "[1"], {}, ["consul.tags", "JSON"]),
        (["--engine-nam", "sim"], {}, ["unknown flag", "--engine-nam"]),
        (["stray"], {}, ["unknown flag", "stray"]),
        (["--policy"], {}, ["--policy", "expected one argument"]),
        ([], {"KVMESH_CONSUL_ENABLED": "maybe"}, ["consul.enabled", "'maybe'", "KVMESH_CONSUL_E"]),
        ([], {"KVMESH_ENGINE_SIM_BLOKSIZE": "4"}, ["KVMESH_ENGINE_SIM_BLOKSIZE", "unknown"]),
        ([], {"KVMESH_CONFIG": "/nowhere.toml"}, ["/nowhere.toml", "No such file"]),
    ],
)
def test_mistakes_are_named(argv: list[str], environ: dict[str, str], said: list[str]) -> None:
    with pytest.raises(config.ConfigError) as caught:
        load(argv, environ)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine.sim]\nblock_size = '4'", ["engine.sim.block_size", "'4'", "integer"]),
        ("[engine.sim]\nblock_size = true", ["engine.sim.block_size", "True", "integer"]),
        (f"[engine.sim]\nspeed = {10**400}", ["engine.sim.speed", "too large"]),
        ("[engine.sim]\nbloksize = 4", ["engine.sim.bloksize", "unknown key", "4"]),
        ("[engin]\nname = 'sim'", ["engin", "unknown key"]),
        ("engine = 'sim'", ["engine", "unknown key", "'sim'"]),
        ("[consul]\ntags = 'a'", ["consul.tags", "list"]),
        ("[consul]\nenabled = 1", ["consul.enabled", "boolean"]),
        ("= 4", ["not valid TOML"]),
    ],
)
def test_mistakes_of_the_file_are_named(tmp_path: Path, text: str, said: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(config.ConfigError) as caught:
        load(["--config", path])
    for part in [*said, path]:
        assert part in str(caught.value)


def test_tables_of_other_processes_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, "name = 'b'\n[router]\nx = 1")
    assert load(["--config", path], foreign=["router"]).name == "b"
    with pytest.raises(config.ConfigError, match="router"):
        load(["--config", path])


def test_variables_of_other_sections_and_of_kubernetes_are_ignored() -> None:
    environ = {
        "KVMESH_ROUTER_X": "1",
        "KVMESH_CONSUL_SERVICE_HOST": "10.0.0.1",
        "KVMESH_CONSUL_PORT": "tcp://10.0.0.1:8500",
        "KVMESH_CONSUL_PORT_8500_TCP_ADDR": "10.0.0.1",
    }
    assert load([], environ) == Service()


def test_secrets_are_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Keys:
        pin: int = field(default=1234, metadata={"secret": True})

    @dataclass(frozen=True)
    class Vault:
        keys: Keys = field(default_factory=Keys)

    with pytest.raises(config.ConfigError) as caught:
        config.load(Vault, argv=["--keys-pin", "hunter2"], environ={}, prog="vault")
    assert "hunter2" not in str(caught.value)
    for flag in ("--help", "--print-config"):
        with pytest.raises(SystemExit) as ended:
            config.load(Vault, argv=[flag], environ={}, prog="vault")
        assert ended.value.code == 0
        assert "1234" not in capsys.readouterr().out


def test_help_names_variable_limits_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens, 100% of them [KVMESH_ENGINE_SIM_BLOCK_SIZE; default 32]" in text
    assert "one of round_robin, least_loaded" in text


def test_a_section_may_refuse_itself_and_a_field_may_be_required() -> None:
    @dataclass(frozen=True)
    class Range:
        low: int
        high: int = 1

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low is above high")

    @dataclass(frozen=True)
    class Outer:
        range: Range

    with pytest.raises(config.ConfigError, match=r"range\.low: required, set --range-low or KV"):
        config.load(Outer, argv=[], environ={}, prog="x")
    with pytest.raises(config.ConfigError, match="range: low is above high"):
        config.load(Outer, argv=["--range-low", "2"], environ={}, prog="x")
    assert config.load(Outer, argv=["--range-low=-1"], environ={}, prog="x").range.low == -1


def test_settings_that_cannot_be_told_apart_are_a_bug() -> None:
    @dataclass(frozen=True)
    class Inner:
        b_c: int = 1

    @dataclass(frozen=True)
    class Outer:
        a: Inner = field(default_factory=Inner)
        a_b_c: int = 1

    with pytest.raises(TypeError, match="KVMESH_A_B_C"):
        config.load(Outer, argv=[], environ={}, prog="x")


texts = st.text(st.characters(codec="utf-8"), max_size=12)
services = st.builds(
    Service,
    name=texts,
    policy=st.sampled_from(Policy),
    engine=st.builds(
        Engine,
        name=st.sampled_from(("sim", "vllm")),
        cache=st.none() | st.just(Path("/a b/c")),
        sim=st.builds(Sim, block_size=st.integers(1), speed=st.floats(-1e300, 10)),
    ),
    consul=st.builds(
        Consul,
        token=st.just(""),
        tags=st.lists(texts, max_size=4).map(tuple),
        ports=st.lists(st.integers(1), max_size=3).map(tuple),
        enabled=st.booleans(),
        limit=st.none() | st.integers(),
    ),
)


@settings(deadline=None, derandomize=True)
@given(services)
@example(Service(consul=Consul(tags=("[",))))
@example(Service(consul=Consul(tags=("a,b", " c", ""))))
def test_a_child_process_gets_the_same_configuration(service: Service) -> None:
    assert load([], config.to_env(service)) == service


@settings(deadline=None, derandomize=True)
@given(services)
def test_the_printed_configuration_can_be_loaded(
    tmp_path_factory: pytest.TempPathFactory, service: Service
) -> None:
    path = tmp_path_factory.mktemp("c") / "printed.toml"
    path.write_text(config.to_toml(service), encoding="utf-8")
    assert load(["--config", str(path)]) == service


def test_overrides_become_flags() -> None:
    overrides = {
        "engine.sim.block_size": 4,
        "consul.enabled": False,
        "consul.tags": ("a", "b,c"),
        "policy": Policy.LEAST_LOADED,
    }
    flags = config.to_flags(overrides)
    assert flags[:2] == ["--engine-sim-block-size=4", "--no-consul-enabled"]
    got = load(flags, {"KVMESH_CONSUL_ENABLED": "true"})
    assert (got.engine.sim.block_size, got.consul.enabled) == (4, False)
    assert (got.consul.tags, got.policy) == (("a", "b,c"), Policy.LEAST_LOADED)


def test_a_main_prints_the_mistake_and_exits_2() -> None:
    code = (
        "from dataclasses import dataclass\n"
        "from kvmesh.config import load_or_exit\n"
        "@dataclass(frozen=True)\n"
        "class C:\n    port: int = 1\n"
        "print(load_or_exit(C, prog='mesh'))\n"
    )
    command = [sys.executable, "-c", code, "--port", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "mesh: port: 'x' is not an integer (from flag --port)\n"
    assert done.stdout == ""
