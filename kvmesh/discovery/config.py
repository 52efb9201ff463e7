"""Settings of service discovery."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.discovery.entry import split_address
from kvmesh.discovery.static import parse_member


class DiscoveryKind(StrEnum):
    """Where members are kept."""

    LOCAL = "local"
    CONSUL = "consul"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """How processes find each other. Raises ValueError where a setting has the wrong form."""

    kind: DiscoveryKind = field(
        default=DiscoveryKind.LOCAL, metadata={"help": "where members are kept"}
    )
    directory: str = field(
        default="",
        metadata={"help": "local: directory of the entries; empty: a temporary one, per user"},
    )
    static_members: tuple[str, ...] = field(
        default=(),
        metadata={"help": "static: members as role=host:port[;field=value...]"},
    )
    consul_address: str = field(
        default="127.0.0.1:8500", metadata={"help": "consul: host:port of the agent's HTTP API"}
    )
    consul_token: str = field(default="", metadata={"help": "consul: ACL token", "secret": True})
    consul_prefix: str = field(
        default="kvmesh", metadata={"help": "consul: services are called <prefix>-<role>"}
    )
    consul_tls: bool = field(default=False, metadata={"help": "consul: use HTTPS"})
    consul_ca_file: str = field(
        default="", metadata={"help": "consul: CA bundle (PEM); empty: the system's"}
    )
    consul_cert_file: str = field(default="", metadata={"help": "consul: client certificate (PEM)"})
    consul_key_file: str = field(
        default="", metadata={"help": "consul: key of the client certificate (PEM)"}
    )
    consul_ttl_seconds: float = field(
        default=4.0,
        metadata={"help": "consul: silence that means death", "min": 1.0, "max": 60.0},
    )
    consul_grpc_check: bool = field(
        default=False,
        metadata={"help": "consul: the agent calls grpc.health.v1 at the member's address as well"},
    )

    def __post_init__(self) -> None:
        """Check what can be checked without touching anything."""
        try:
            split_address(self.consul_address)
        except ValueError as error:
            raise ValueError(f"consul_address: {error}") from None
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", self.consul_prefix):
            raise ValueError(f"consul_prefix: {self.consul_prefix!r} is not a name")
        if bool(self.consul_cert_file) != bool(self.consul_key_file):
            raise ValueError("consul_cert_file and consul_key_file are only valid together")
        for item in self.static_members:
            try:
                parse_member(item)
            except ValueError as error:
                raise ValueError(f"static_members: {item!r}: {error}") from None
