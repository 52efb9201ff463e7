"""Configuration of a tokenizer process."""

from dataclasses import dataclass, field

from kvmesh.discovery import DiscoveryConfig
from kvmesh.host.config import ModelConfig
from kvmesh.rpc.config import RpcConfig
from kvmesh.telemetry import TelemetryConfig
from services.tokenizer.codec import MAX_PROMPT_CHARS


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """How much text is taken. Sizes are in characters; a token id counts as one."""

    max_prompt_chars: int = field(
        default=MAX_PROMPT_CHARS, metadata={"help": "longest prompt", "min": 1}
    )
    long_prompt_chars: int = field(
        default=20_000,
        metadata={"help": "prompts from here on are encoded apart from shorter ones", "min": 1},
    )
    max_waiting: int = field(
        default=10_000, metadata={"help": "prompts that may wait to be encoded", "min": 1}
    )
    max_waiting_chars: int = field(
        default=50_000_000, metadata={"help": "size of all prompts that wait", "min": 1}
    )
    max_stop_chars: int = field(
        default=20_000, metadata={"help": "size of all stop strings of a request", "min": 1}
    )
    max_bad_word_chars: int = field(
        default=40_000, metadata={"help": "size of all bad words of a request", "min": 1}
    )
    allow_request_templates: bool = field(
        default=False,
        metadata={"help": "whether requests may bring a chat template; it runs apart"},
    )
    request_template_seconds: float = field(
        default=1.0, metadata={"help": "how long a request's chat template may run", "min": 0.01}
    )


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Everything that can be set for a tokenizer process."""

    rpc: RpcConfig = field(default_factory=RpcConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: LimitsConfig = field(default_factory=LimitsConfig)
