"""Service discovery: who is there."""

from kvmesh.discovery.base import Discovery, Registration, Registry, Resolver
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.factory import create

__all__ = [
    "Discovery",
    "DiscoveryConfig",
    "DiscoveryKind",
    "Registration",
    "Registry",
    "Resolver",
    "create",
]
