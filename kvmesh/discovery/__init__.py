"""Service discovery: who is there."""

from kvmesh.discovery.base import (
    ROUTING_SETTINGS,
    Discovery,
    Registration,
    Registry,
    Resolver,
    SharedText,
)
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.factory import create
from kvmesh.discovery.text_file import FileText

__all__ = [
    "ROUTING_SETTINGS",
    "Discovery",
    "DiscoveryConfig",
    "DiscoveryKind",
    "FileText",
    "Registration",
    "Registry",
    "Resolver",
    "SharedText",
    "create",
]
