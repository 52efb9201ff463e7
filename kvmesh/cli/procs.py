"""Processes of this machine, told apart from later ones with the same number."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from kvmesh.types import Role

_STATE, _START_TICKS = 0, 19  # places in /proc/<pid>/stat, counted after the command's name
_GONE = frozenset("ZX")


@dataclass(frozen=True, slots=True)
class Running:
    """A process that was started for a cluster.

    `started` is the kernel's start time in clock ticks: with the number it names one process
    for as long as the machine is up. The process leads a session and group of its own.
    """

    name: str
    role: Role
    pid: int
    started: int
    log: Path

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie doesn't."""
        return start_ticks(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it is gone."""
        if self.is_alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        """Kill it and all that it has started, unless it is gone."""
        if self.is_alive():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = text.rpartition(")")[2].split()
    return None if values[_STATE] in _GONE else int(values[_START_TICKS])


def how_it_ended(code: int) -> str:
    """Say in words what a child's return code means."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_lines(path: Path, count: int, limit: int = 16_384) -> list[str]:
    """Return the last lines of a log that aren't empty; [] where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
