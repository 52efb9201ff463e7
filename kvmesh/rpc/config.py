"""Limits and timings of gRPC, equal on both sides of every connection."""

import socket
from dataclasses import dataclass, field

_Options = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class RpcConfig:
    """How this process speaks gRPC."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(
        default=0, metadata={"help": "port to listen on; 0: any free one", "min": 0, "max": 65535}
    )
    advertise: str = field(
        default="",
        metadata={
            "help": "host that others reach this one at; empty: the host, or this machine's "
            "name where that is a wildcard"
        },
    )
    max_message_mib: int = field(
        default=64, metadata={"help": "largest message, both ways, in MiB", "min": 1, "max": 1024}
    )
    keepalive_seconds: float = field(
        default=20.0, metadata={"help": "time between pings that find dead peers", "min": 1.0}
    )
    drain_seconds: float = field(
        default=30.0, metadata={"help": "time for running requests at shutdown", "min": 0.0}
    )

    @property
    def reachable_host(self) -> str:
        """The host that others reach this process at."""
        return reachable(self.host, self.advertise)

    def channel_options(self) -> _Options:
        """Return the options of a client channel."""
        return [
            *self._common(),
            # A restarted peer is reached again at once, not after gRPC's minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            # In fact the time for one attempt to connect: a busy peer needs its share.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # Traffic inside the mesh never goes through a proxy.
            ("grpc.enable_http_proxy", 0),
            # Channels that share a subchannel share its back-off and its TCP connection.
            ("grpc.use_local_subchannel_pool", 1),
        ]

    def server_options(self) -> _Options:
        """Return the options of a server."""
        ping_ms = int(self.keepalive_seconds * 1000)
        return [
            *self._common(),
            # Without this a client's pings are answered by GOAWAY `too_many_pings`.
            ("grpc.http2.min_ping_interval_without_data_ms", ping_ms // 2),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", ping_ms // 2),
            # Two servers on one port would each get half of the connections.
            ("grpc.so_reuseport", 0),
        ]

    def _common(self) -> _Options:
        size = self.max_message_mib * 1024 * 1024
        return [
            ("grpc.max_send_message_length", size),
            ("grpc.max_receive_message_length", size),
            ("grpc.keepalive_time_ms", int(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


def reachable(host: str, advertise: str) -> str:
    """Return where others reach what listens on `host`: this machine's name for a wildcard."""
    wildcard = host in {"0.0.0.0", "::", "[::]"}
    return advertise or (socket.gethostname() if wildcard else host)
