"""`--set`, and the settings of the command itself."""

import pytest

from kvmesh.cli.console import CommandError
from kvmesh.cli.settings import Override, own_config, parse_overrides, variables
from kvmesh.discovery import DiscoveryKind
from kvmesh.types import Role


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVMESH_CONFIG", "KVMESH_RPC_DRAIN_SECONDS"):
        monkeypatch.delenv(name, raising=False)


def test_an_override_may_be_for_one_role() -> None:
    assert parse_overrides(["rpc.drain_seconds=5", "decode:engine.sim.seed=a=b"]) == [
        Override("rpc.drain_seconds", "5"),
        Override("engine.sim.seed", "a=b", Role.DECODE),
    ]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("drain_seconds=5", "use section.field=value"),
        ("rpc.drain_seconds", "use section.field=value"),
        (".x=5", "use section.field=value"),
        ("engine:engine.sim.seed=1", "'engine' is no role"),
        ("http.port=1", "use --http-port for this"),
        ("model.path=/x", "use --model for this"),
    ],
)
def test_what_is_no_setting_is_refused(item: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        parse_overrides([item])


def test_a_roles_own_override_wins() -> None:
    overrides = parse_overrides(["decode:rpc.drain_seconds=1", "rpc.drain_seconds=2"])
    assert variables(overrides, Role.DECODE) == {"KVMESH_RPC_DRAIN_SECONDS": "1"}
    assert variables(overrides, Role.ROUTER) == {"KVMESH_RPC_DRAIN_SECONDS": "2"}
    assert variables(overrides, None) == {"KVMESH_RPC_DRAIN_SECONDS": "2"}


def test_the_command_sees_what_the_processes_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_RPC_DRAIN_SECONDS", "7")
    monkeypatch.setenv("KVMESH_DISCOVERY_CONSUL_TOKEN", "secret")
    found_by = {"kind": "consul", "consul_address": "127.0.0.1:1"}
    own = own_config(found_by)
    assert own.rpc.drain_seconds == 7
    assert own.discovery.kind is DiscoveryKind.CONSUL
    assert own.discovery.consul_token == "secret"
    overrides = parse_overrides(["rpc.drain_seconds=9", "engine.sim.seed=1"])
    assert own_config(found_by, overrides).rpc.drain_seconds == 9
