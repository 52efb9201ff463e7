"""The door of a process: counts what is inside, and closes for a drain."""

import asyncio

from kvmesh.errors import DrainingError


class Gate:
    """Counts running requests over all of a process's RPCs.

    Once closed it lets nobody in, and `idle` tells when the last one has left.
    """

    def __init__(self) -> None:
        self.running = 0
        """Requests inside now."""
        self.entered = 0
        """Requests let in since the start."""
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Count a request in. Raises `DrainingError` once closed."""
        if self.closed:
            raise DrainingError("this process is shutting down", retry_after=1.0)
        self.running += 1
        self.entered += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request out."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        self.closed = True

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()
