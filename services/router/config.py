"""Everything a router process can be told."""

from dataclasses import dataclass, field

from kvmesh.discovery import DiscoveryConfig
from kvmesh.rpc.config import RpcConfig
from kvmesh.telemetry import TelemetryConfig
from services.router.admission import QueueConfig
from services.router.decisions import DecisionsConfig
from services.router.planner import RoutingConfig
from services.router.tuning import TuningConfig
from services.router.watcher import WatchConfig


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Configuration of a router process, by section."""

    rpc: RpcConfig = field(default_factory=RpcConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    decisions: DecisionsConfig = field(default_factory=DecisionsConfig)
