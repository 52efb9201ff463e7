"""Configuration of a decode process."""

from dataclasses import dataclass, field

from kvmesh.discovery import DiscoveryConfig
from kvmesh.engine.factory import EngineConfig
from kvmesh.host.config import ModelConfig
from kvmesh.rpc.config import RpcConfig
from kvmesh.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """All that a decode process can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rpc: RpcConfig = field(default_factory=RpcConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
