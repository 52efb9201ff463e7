"""One run of `kvmesh up`, from the first process to the last."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from kvmesh.cli import rest
from kvmesh.cli.cluster import Child, end_of_log, launch, observe, reap
from kvmesh.cli.console import CommandError, err, out
from kvmesh.cli.guide import print_guide, print_sample
from kvmesh.cli.interrupts import Interrupted, Interrupts, interrupts, unless
from kvmesh.cli.plan import Planned
from kvmesh.cli.procs import how_it_ended
from kvmesh.cli.settings import Override, OwnConfig, variables
from kvmesh.cli.state import ClusterState, StateDir
from kvmesh.cli.stopping import kill, stop
from kvmesh.cli.view import view
from kvmesh.clock import Clock
from kvmesh.config import environment
from kvmesh.discovery import create
from kvmesh.host.roster import Roster, roster

LOOK_SECONDS = 0.2
"""How often children, logs and members are looked at."""

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Session:
    """What a run is made with."""

    state: StateDir
    cluster: ClusterState
    own: OwnConfig
    clock: Clock
    rng: random.Random
    timeout: float
    sample: bool


async def run(
    session: Session, planned: Sequence[Planned], overrides: Sequence[Override], *, detach: bool
) -> int:
    """Start, wait, show, follow, stop; returns the exit code. Detached: leave all running."""
    children: list[Child] = []
    is_up = False
    with interrupts() as caught:
        try:
            await unless(caught.first, _start(session, planned, overrides, children))
            is_up = True
            print_guide(session.cluster, session.state.path, detached=detach)
            if detach:
                return 0
            code = await unless(caught.first, _follow(children))
        except Interrupted:
            code = 0 if is_up else EXIT_INTERRUPTED
            out.print("\nStopping: running requests may end first; Ctrl-C again stops at once.")
        except BaseException:
            err.print("Stopping what was started.")
            await _stop(session, children, caught)
            raise
        await _stop(session, children, caught)
    return code


async def _start(
    session: Session,
    planned: Sequence[Planned],
    overrides: Sequence[Override],
    children: list[Child],
) -> None:
    began = session.clock.now()
    _say_what(session.cluster, planned)
    for item in planned:
        environ = environment() | variables(overrides, item.role)
        children.append(launch(item, environ, session.state, session.clock))
        processes = tuple(child.running for child in children)
        session.state.write(replace(session.cluster, processes=processes))
    await _until_ready(session, children, began + session.timeout)
    seconds = session.clock.now() - began
    out.print(f"\nReady {seconds:.1f} s after the first process was started.\n", style="bold green")
    if session.sample:
        await print_sample(session.cluster)


async def _until_ready(session: Session, children: Sequence[Child], deadline: float) -> None:
    async with AsyncExitStack() as stack:
        discovery = await stack.enter_async_context(
            create(session.own.discovery, session.clock, session.rng)
        )
        members = await stack.enter_async_context(roster(discovery))
        shown = stack.enter_context(view(out))
        while not await _is_ready(session, children, members):
            shown.show(children)
            if session.clock.now() > deadline:
                raise _too_slow(session, children)
            await asyncio.sleep(LOOK_SECONDS)
        shown.show(children)


async def _is_ready(session: Session, children: Sequence[Child], members: Roster) -> bool:
    """Whether every process is ready and every frontend says that requests can be served."""
    observe(children, members.members, session.clock)
    if ended := reap(children):
        raise _died(ended[0])
    if not all(child.is_ready for child in children):
        return False
    return all(await asyncio.gather(*map(rest.is_ready, session.cluster.http)))


async def _follow(children: Sequence[Child]) -> int:
    """Tell of every child that ends, until none is left; returns the exit code."""
    while any(child.code is None for child in children):
        for child in reap(children):
            if child.code == 0:
                out.print(f"{child.name} (pid {child.running.pid}) has stopped.")
            else:
                err.print(f"{_died(child).message}\nThe rest goes on.", markup=False)
        await asyncio.sleep(LOOK_SECONDS)
    out.print("No process is left.")
    return int(any(child.code for child in children))


async def _stop(session: Session, children: Sequence[Child], caught: Interrupts) -> None:
    processes = [child.running for child in children]
    try:
        await unless(
            caught.second,
            stop(processes, session.cluster.drain_seconds, session.clock, _tell),
        )
    except Interrupted:
        err.print("Killing what is left.")
        await kill(processes, session.clock)
    for child in children:
        child.popen.wait()
    session.state.clear()
    out.print("Stopped.")


def _say_what(cluster: ClusterState, planned: Sequence[Planned]) -> None:
    roles = [item.role for item in planned]
    counts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
    out.print(f"Starting {cluster.model} on the engine {cluster.engine}: {counts}.\n")


def _tell(text: str) -> None:
    err.print(text, markup=False)


def _died(child: Child) -> CommandError:
    how = how_it_ended(child.code or 0)
    return CommandError(
        f"{child.name} (pid {child.running.pid}) ended: {how}. The end of {child.running.log}:\n"
        f"{end_of_log(child)}"
    )


def _too_slow(session: Session, children: Sequence[Child]) -> CommandError:
    waiting = [child for child in children if not child.is_ready]
    what = ", ".join(child.name for child in waiting) or "the way through all of them"
    logs = "".join(f"\nThe end of {c.running.log}:\n{end_of_log(c, 5)}" for c in waiting)
    return CommandError(f"not ready after {session.timeout:.0f} s: {what}.{logs}")
