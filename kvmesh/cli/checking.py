"""Asking the services whether they understand what was set, before anything starts."""

import re
import subprocess
import sys
from collections.abc import Sequence

from kvmesh.cli.console import CommandError
from kvmesh.cli.plan import Planned, roles_of
from kvmesh.cli.settings import Override, variables
from kvmesh.config import environment, to_flags

_SECONDS = 60.0

_TABLE = re.compile(r"^\[([\w.]+)\]$", re.MULTILINE)


def check_overrides(overrides: Sequence[Override], planned: Sequence[Planned]) -> None:
    """Raise CommandError for a value that a process refuses, or that no process knows."""
    if not overrides:
        return
    asked = [(item, _ask(item, overrides)) for item in roles_of(planned)]
    sections = {item.role: _answer(item, process) for item, process in asked}
    for override in overrides:
        section = override.key.rpartition(".")[0]
        if not any(
            section in known for role, known in sections.items() if override.role in {None, role}
        ):
            whom = f"{override.role} has no" if override.role else "no process has a"
            raise CommandError(f"--set {override.key}: {whom} section {section!r}")


def _ask(planned: Planned, overrides: Sequence[Override]) -> subprocess.Popen[str]:
    """Begin to ask a process of a role for its effective configuration; all are asked at once."""
    command = [sys.executable, "-m", f"services.{planned.role}", "--print-config"]
    return subprocess.Popen(
        [*command, *to_flags(planned.settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment() | variables(overrides, planned.role),
        text=True,
    )


def _answer(planned: Planned, process: subprocess.Popen[str]) -> set[str]:
    """Return the sections that it has."""
    try:
        output, complaint = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise CommandError(f"{planned.role} did not tell its configuration in time") from None
    if process.returncode:
        lines = complaint.strip().splitlines() or [f"exit code {process.returncode}"]
        raise CommandError(lines[-1])
    return set(_TABLE.findall(output))
