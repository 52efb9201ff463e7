"""Stopping a cluster in the order in which it drains: from the clients' end to the engines."""

import asyncio
import signal
from collections.abc import Callable, Sequence

from kvmesh.cli.procs import Running
from kvmesh.clock import Clock
from kvmesh.types import Role

_ORDER = (
    frozenset({Role.FRONTEND}),
    frozenset({Role.TOKENIZER, Role.ROUTER}),
    frozenset({Role.PREFILL, Role.DECODE}),
)

CLOSE_SECONDS = 10.0
"""A process has this long, beyond its drain, to close what it holds: an engine, a GPU."""

_POLL_SECONDS = 0.05

Tell = Callable[[str], None]


async def stop(
    processes: Sequence[Running], drain_seconds: float, clock: Clock, tell: Tell
) -> None:
    """Ask every process to end, group after group; kill what hasn't in time. None is left.

    Running requests end first: each group has `drain_seconds` and what closing takes.
    """
    for roles in _ORDER:
        group = [process for process in processes if process.role in roles]
        for process in group:
            process.send(signal.SIGTERM)
        late = await _wait(group, drain_seconds + CLOSE_SECONDS, clock)
        for process in late:
            tell(f"{process.name} (pid {process.pid}) did not stop in time: killed")
        await kill(late, clock)


async def kill(processes: Sequence[Running], clock: Clock) -> None:
    """Kill at once, with all that they have started."""
    for process in processes:
        process.kill()
    await _wait(processes, CLOSE_SECONDS, clock)


async def _wait(processes: Sequence[Running], seconds: float, clock: Clock) -> list[Running]:
    """Wait until all are gone; return those that aren't in time."""
    deadline = clock.now() + seconds
    while alive := [process for process in processes if process.is_alive()]:
        if clock.now() >= deadline:
            return alive
        await asyncio.sleep(_POLL_SECONDS)
    return []
