"""Finds policies by name: the built-in ones, then those of other packages.

A package offers one as an entry point of the group `kvmesh.policies` that names its class.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points

from kvmesh.config import ConfigError
from services.router.policies import BUILT_IN
from services.router.policy import Policy

ENTRY_POINT_GROUP = "kvmesh.policies"

PolicyFactory = Callable[[], Policy]


def find_policy(name: str, setting: str = "routing.policy") -> PolicyFactory:
    """Return the factory of a policy. Raises `ConfigError` listing the names."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    plug_ins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plug_ins.names:
        factory: PolicyFactory = plug_ins[name].load()
        return factory
    names = ", ".join(sorted({*BUILT_IN, *plug_ins.names}))
    raise ConfigError(f"{setting}: {name!r} is not one of {names}")


class Policies:
    """Which policy places the requests of which model: `default`, or what `by_model` says."""

    def __init__(self, default: str, by_model: Iterable[str] = ()) -> None:
        """Find them all. Raises `ConfigError` for a name that does not exist."""
        self.default = default
        self._factories: dict[str, PolicyFactory] = {default: find_policy(default)}
        self._by_model: Mapping[str, str] = dict(_pair(entry) for entry in by_model)
        for name in self._by_model.values():
            self._factories[name] = find_policy(name, "routing.policy_by_model")

    def name(self, model: str) -> str:
        """Return the name of a model's policy."""
        return self._by_model.get(model, self.default)

    def make(self, model: str) -> Policy:
        """Return a new policy for one pool of a model."""
        return self._factories[self.name(model)]()


def _pair(entry: str) -> tuple[str, str]:
    model, equals, policy = entry.rpartition("=")
    if not equals or not model:
        raise ConfigError(f"routing.policy_by_model: {entry!r} is not model=policy")
    return model, policy
