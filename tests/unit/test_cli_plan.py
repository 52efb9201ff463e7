"""Which processes `kvmesh up` starts, and what it tells each."""

import socket
from pathlib import Path

import pytest

from kvmesh.cli.console import CommandError
from kvmesh.cli.plan import HOST, Engine, Layout, Planned, Served, default_engine, plan, roles_of
from kvmesh.cli.settings import parse_overrides
from kvmesh.models import ModelInfo
from kvmesh.types import Role

TINY = Served(Path("/m/tiny"), ModelInfo("tiny", 65536, 259, (2,)))
LARGE = Served(Path("/m/large"), ModelInfo("large", 8192, 49152, (2,)))
FOUND_BY = {"kind": "local", "directory": "/state/members"}


def layout(**counts: int) -> Layout:
    return Layout({role: counts.get(role.value, 1) for role in Role}, 8000, 9000)


def by_name(planned: list[Planned]) -> dict[str, Planned]:
    return {item.name: item for item in planned}


def test_one_process_of_each_role_the_slow_ones_first() -> None:
    planned = plan(layout(), Engine.SIM, TINY, FOUND_BY, [])
    names = [item.name for item in planned]
    assert names == ["prefill-1", "decode-1", "tokenizer-1", "router-1", "frontend-1"]
    assert all(item.settings["discovery.directory"] == "/state/members" for item in planned)


def test_roles_can_be_many_or_none() -> None:
    planned = plan(layout(prefill=0, decode=3), Engine.SIM, TINY, FOUND_BY, [])
    roles = [item.role for item in planned]
    assert roles.count(Role.DECODE) == 3
    assert Role.PREFILL not in roles
    assert [item.role for item in roles_of(planned)] == [
        Role.DECODE, Role.TOKENIZER, Role.ROUTER, Role.FRONTEND,
    ]  # fmt: skip


def test_only_who_serves_the_model_is_told_of_it() -> None:
    planned = by_name(plan(layout(), Engine.VLLM, LARGE, FOUND_BY, []))
    assert planned["decode-1"].settings["engine.name"] == "vllm"
    assert planned["tokenizer-1"].settings["model.path"] == Path("/m/large")
    assert "engine.name" not in planned["tokenizer-1"].settings
    assert "model.path" not in planned["router-1"].settings
    assert "model.path" not in planned["frontend-1"].settings


def test_engines_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    two = by_name(plan(layout(), Engine.VLLM, LARGE, FOUND_BY, []))
    assert two["prefill-1"].settings["engine.vllm.threads"] == 4
    many = by_name(plan(layout(decode=12), Engine.VLLM, LARGE, FOUND_BY, []))
    assert many["decode-12"].settings["engine.vllm.threads"] == 1
    simulated = by_name(plan(layout(), Engine.SIM, TINY, FOUND_BY, []))["decode-1"].settings
    assert not [key for key in simulated if key.endswith("threads")]


def test_frontends_count_their_ports_up_and_the_others_take_free_ones() -> None:
    wide = layout(frontend=3)
    planned = by_name(plan(wide, Engine.SIM, TINY, FOUND_BY, []))
    assert planned["frontend-3"].settings["http.port"] == 8002
    assert planned["frontend-3"].settings["rpc.port"] == 9002
    assert planned["router-1"].settings["rpc.port"] == 0
    assert wide.http() == tuple(f"http://{HOST}:{port}" for port in (8000, 8001, 8002))
    assert wide.grpc()[2] == f"{HOST}:9002"


def test_what_is_overridden_is_left_to_the_override() -> None:
    overrides = parse_overrides(["decode:engine.vllm.threads=3"])
    planned = by_name(plan(layout(), Engine.VLLM, LARGE, FOUND_BY, overrides))
    assert "engine.vllm.threads" not in planned["decode-1"].settings
    assert "engine.vllm.threads" in planned["prefill-1"].settings


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = Layout(dict.fromkeys(Role, 1), port, 9000 if port != 9000 else 9001)
        with pytest.raises(CommandError, match=rf"port {port} .* another --http-port"):
            busy.check_ports()


def test_ports_that_overlap_or_do_not_exist_are_refused() -> None:
    with pytest.raises(CommandError, match="overlap"):
        Layout({**dict.fromkeys(Role, 1), Role.FRONTEND: 2}, 8000, 8001).check_ports()
    with pytest.raises(CommandError, match="there is no port 65536"):
        Layout({**dict.fromkeys(Role, 1), Role.FRONTEND: 2}, 65535, 9000).http()


@pytest.mark.parametrize(
    ("script", "engine"),
    [("exit 0", Engine.VLLM), ("exit 9", Engine.TORCH), (None, Engine.TORCH)],
)
def test_only_a_gpu_that_answers_makes_vllm_the_default(
    script: str | None, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert default_engine() is engine
