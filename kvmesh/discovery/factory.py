"""Discovery as configured."""

import os
import random
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvmesh.clock import Clock
from kvmesh.discovery.base import Discovery
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.local import LocalDiscovery
from kvmesh.discovery.static import StaticDiscovery, parse_member
from kvmesh.errors import UnavailableError


@asynccontextmanager
async def create(
    config: DiscoveryConfig, clock: Clock, rng: random.Random
) -> AsyncIterator[Discovery]:
    """Open the configured discovery; it serves until the context is left.

    Leave registrations and close watches before. Raises UnavailableError if the local
    directory can't be used, and OSError for TLS files that can't be read; an unreachable
    Consul is no error.
    """
    if config.kind is DiscoveryKind.CONSUL:
        # Imported here: only who uses Consul pays for its client and an HTTP client.
        from kvmesh.discovery.consul import ConsulDiscovery

        async with ConsulDiscovery(config, clock, rng) as discovery:
            yield discovery
    elif config.kind is DiscoveryKind.STATIC:
        yield StaticDiscovery(parse_member(item) for item in config.static_members)
    else:
        yield LocalDiscovery(local_directory(config), clock)


def local_directory(config: DiscoveryConfig) -> Path:
    """Return the directory of the `local` kind, made if it isn't there, private if default.

    Raises UnavailableError if it can't be used.
    """
    if config.directory:
        path = Path(config.directory)
    else:
        path = Path(tempfile.gettempdir()) / f"kvmesh-{os.getuid()}" / "discovery"
    try:
        for made in (path.parent, path):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not config.directory:
                _check_private(made)
    except OSError as error:
        raise UnavailableError(f"discovery directory {path}: {error}") from error
    return path


def _check_private(path: Path) -> None:
    """Refuse what another user has put where everybody may write."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} is not a private directory of this user")
