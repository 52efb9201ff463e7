"""The processes of a local cluster as children of this one."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.cli.console import CommandError
from kvmesh.cli.plan import Planned
from kvmesh.cli.procs import Running, last_lines, start_ticks
from kvmesh.cli.state import StateDir
from kvmesh.clock import Clock
from kvmesh.config import to_flags
from kvmesh.types import Member, State


@dataclass(slots=True)
class Child:
    """One process. It outlives this one unless it is stopped.

    `seconds`: how long it took to become ready, or has taken so far. `code` is its return
    code once it has ended.
    """

    running: Running
    born: float
    popen: subprocess.Popen[bytes] = field(repr=False)
    member: Member | None = None
    seconds: float = 0.0
    code: int | None = None

    @property
    def name(self) -> str:
        """Its role and number."""
        return self.running.name

    @property
    def is_ready(self) -> bool:
        """Whether it runs and takes work."""
        return self.code is None and self.member is not None and self.member.state is State.READY


def launch(planned: Planned, environ: Mapping[str, str], state: StateDir, clock: Clock) -> Child:
    """Start a process in a session of its own, so that Ctrl-C in a terminal doesn't reach it."""
    log = state.log(planned.name)
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    command = [sys.executable, "-m", f"services.{planned.role}", *to_flags(planned.settings)]
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
    started = start_ticks(popen.pid)
    if started is None:
        raise CommandError(f"{planned.name} ended as soon as it was started")
    running = Running(planned.name, planned.role, popen.pid, started, log)
    return Child(running, clock.now(), popen)


def observe(children: Sequence[Child], members: Sequence[Member], clock: Clock) -> None:
    """Bring what starting children look like up to date."""
    by_process = {(member.role, member.pid): member for member in members}
    for child in children:
        if not child.is_ready and child.code is None:
            child.seconds = clock.now() - child.born
        child.member = by_process.get((child.running.role, child.running.pid))


def reap(children: Sequence[Child]) -> list[Child]:
    """Return the children that have ended since the last look."""
    ended = []
    for child in children:
        if child.code is None:
            child.code = child.popen.poll()
            if child.code is not None:
                ended.append(child)
    return ended


def end_of_log(child: Child, count: int = 15) -> str:
    """Return the last lines of a child's log, indented."""
    lines = last_lines(child.running.log, count) or ["(its log is empty)"]
    return "\n".join(f"    {line}" for line in lines)
