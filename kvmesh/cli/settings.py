"""`--set section.field=value`, and the settings that the command itself needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.cli.console import CommandError
from kvmesh.config import CONFIG_VARIABLE, PREFIX, environment, load, to_flags
from kvmesh.discovery import DiscoveryConfig
from kvmesh.rpc.config import RpcConfig
from kvmesh.types import Role

_OWN_OPTIONS = {
    "discovery.kind": "--discovery",
    "discovery.directory": "--state-dir",
    "discovery.consul_address": "--consul-addr",
    "engine.name": "--engine",
    "model.path": "--model",
    "model.name": "--model",
    "http.port": "--http-port",
    "rpc.port": "--grpc-port",
}


@dataclass(frozen=True, slots=True)
class OwnConfig:
    """What the command shares with the processes that it starts."""

    rpc: RpcConfig = field(default_factory=RpcConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set`. `role` None: for every process that has the setting."""

    key: str
    value: str
    role: Role | None = None

    @property
    def variable(self) -> str:
        """The environment variable that says the same."""
        return PREFIX + self.key.replace(".", "_").upper()


def parse_overrides(items: Sequence[str]) -> list[Override]:
    """Read `[role:]section.field=value`; raises CommandError for anything else."""
    return [_parse(item) for item in items]


def variables(overrides: Sequence[Override], role: Role | None) -> dict[str, str]:
    """Return the environment variables of what is set for a role; the role's own win."""
    common = {item.variable: item.value for item in overrides if item.role is None}
    return common | {item.variable: item.value for item in overrides if role and item.role is role}


def own_config(discovery: Mapping[str, str], overrides: Sequence[Override] = ()) -> OwnConfig:
    """Return what the processes see too. `discovery` are settings of that section."""
    environ = environment() | variables(overrides, None)
    environ.pop(CONFIG_VARIABLE, None)
    flags = to_flags({f"discovery.{name}": value for name, value in discovery.items()})
    return load(OwnConfig, argv=flags, environ=environ, prog="kvmesh")


def _parse(item: str) -> Override:
    key, equals, value = item.partition("=")
    prefix, colon, rest = key.partition(":")
    role = None
    if colon:
        key = rest
        if prefix not in list(Role):
            raise CommandError(f"--set {item}: {prefix!r} is no role: use {', '.join(Role)}")
        role = Role(prefix)
    if not equals or not all(key.split(".")[:2]) or "." not in key:
        raise CommandError(f"--set {item}: use section.field=value, e.g. engine.sim.block_size=32")
    if key in _OWN_OPTIONS:
        raise CommandError(f"--set {item}: use {_OWN_OPTIONS[key]} for this")
    return Override(key, value, role)
