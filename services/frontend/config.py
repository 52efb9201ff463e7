"""Everything a frontend process can be told."""

from dataclasses import dataclass, field

from kvmesh.discovery import DiscoveryConfig
from kvmesh.rpc.config import RpcConfig
from kvmesh.sampling import MAX_BAD_WORDS
from kvmesh.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """How this process speaks HTTP."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(
        default=8000,
        metadata={"help": "port to listen on; 0: any free one", "min": 0, "max": 65535},
    )
    api_keys: tuple[str, ...] = field(
        default=(),
        metadata={
            "secret": True,
            "help": "keys of which callers must show one; none: everybody may call",
        },
    )
    max_body_mib: int = field(
        default=16, metadata={"help": "largest request body, in MiB", "min": 1, "max": 1024}
    )
    max_connections: int = field(
        default=8192, metadata={"help": "open connections; one has one stream at a time", "min": 1}
    )
    keep_alive_seconds: int = field(
        default=75, metadata={"help": "how long an idle connection is kept", "min": 1}
    )
    backlog: int = field(
        default=2048, metadata={"help": "connections waiting to be accepted", "min": 1}
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What one request may ask for."""

    request_seconds: float = field(
        default=600.0, metadata={"help": "longest life of a request, in seconds", "min": 0.1}
    )
    attempts: int = field(
        default=3, metadata={"help": "workers tried before a request fails", "min": 1, "max": 10}
    )
    messages: int = field(
        default=4096, metadata={"help": "messages in one conversation at most", "min": 1}
    )
    choices: int = field(
        default=128,
        metadata={"help": "answers of one request, n for each of its prompts", "min": 1},
    )
    stops: int = field(
        default=16, metadata={"help": "stop strings of one request", "min": 1, "max": 1024}
    )
    stop_chars: int = field(
        default=1024,
        metadata={"help": "characters of one stop string: so much text is held back", "min": 1},
    )
    stop_token_ids: int = field(
        default=256, metadata={"help": "stop token ids of one request", "min": 1}
    )
    bad_words: int = field(
        default=128,
        metadata={"help": "bad words of one request", "min": 1, "max": MAX_BAD_WORDS},
    )
    bad_word_chars: int = field(
        default=256, metadata={"help": "characters of one bad word", "min": 1}
    )
    explain: bool = field(
        default=True,
        metadata={"help": "whether callers may ask which workers answer them, and why"},
    )


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Configuration of a frontend process, by section."""

    rpc: RpcConfig = field(default_factory=RpcConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
