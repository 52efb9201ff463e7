"""The membership as it is now, kept up to date by one task."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvmesh.discovery.base import Resolver
from kvmesh.types import Member, Role, State

log = logging.getLogger(__name__)

Listener = Callable[[tuple[Member, ...]], None]


class Roster:
    """Who is there. Read it in the event loop; it changes only between loop turns."""

    def __init__(self) -> None:
        self.members: tuple[Member, ...] = ()
        self._listeners: list[Listener] = []
        self._first = asyncio.Event()

    def ready(self, role: Role, model: str = "") -> list[Member]:
        """Return the members of a role that take work, of one model where it is given."""
        return [
            member
            for member in self.members
            if member.role is role
            and member.state is State.READY
            and (not model or member.model == model)
        ]

    def listen(self, listener: Listener) -> None:
        """Call `listener` with the whole membership after every change, and once now."""
        self._listeners.append(listener)
        listener(self.members)

    async def first(self) -> None:
        """Wait until the registry has answered once."""
        await self._first.wait()

    def update(self, members: tuple[Member, ...]) -> None:
        """Take a new membership and tell the listeners."""
        self.members = members
        self._first.set()
        for listener in self._listeners:
            listener(members)


@asynccontextmanager
async def roster(resolver: Resolver) -> AsyncIterator[Roster]:
    """Yield a roster that follows `resolver` until it is left."""
    current = Roster()
    task = asyncio.create_task(_follow(resolver, current))
    try:
        yield current
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _follow(resolver: Resolver, current: Roster) -> None:
    try:
        async for members in resolver.watch():
            current.update(members)
    except Exception:  # top of a background task
        log.exception("following the registry failed; the last known members stand")
        raise
