"""The HTTP server: uvicorn in our own event loop, without its signal handlers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import uvicorn

from kvmesh.errors import UnavailableError
from services.frontend.config import HttpConfig
from services.frontend.rest.protocol import Protocol

SHUTDOWN_SECONDS = 2
"""For connections that are still open at the end; running requests have ended before."""


@contextlib.asynccontextmanager
async def serve_http(app: Any, config: HttpConfig) -> AsyncIterator[int]:
    """Serve an ASGI application; yields the port it listens on.

    Raises `UnavailableError` when the port is taken.
    """
    listener = _listen(config)
    server = _Server(
        uvicorn.Config(
            app,
            http=partial(Protocol, max_connections=config.max_connections),
            ws="none",
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            backlog=config.backlog,
            timeout_keep_alive=config.keep_alive_seconds,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait({task, ready}, return_when="FIRST_COMPLETED")
        if task.done():
            task.result()
        yield listener.getsockname()[1]
    finally:
        ready.cancel()
        server.should_exit = True
        await asyncio.gather(task, ready, return_exceptions=True)


def _listen(config: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host.strip("[]"), config.port))
    except OSError as error:
        listener.close()
        raise UnavailableError(
            f"can't listen on {config.host}:{config.port}: {error.strerror}", field="http.port"
        ) from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's server, as one part of a process that handles signals itself."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.ready.set()
