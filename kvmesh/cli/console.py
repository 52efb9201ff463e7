"""What every command shares: where it writes, and the options that several have."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvmesh.config import environment
from kvmesh.errors import MeshError

_PIPE_WIDTH = 200
"""A file or a pipe has no edge at which a table would have to be cut."""


def _console(*, stderr: bool) -> Console:
    console = Console(highlight=False, soft_wrap=True, stderr=stderr)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


out = _console(stderr=False)
err = _console(stderr=True)


class CommandError(MeshError):
    """A command can't do what it was asked for. The message is all that is shown."""


def subcommand(**settings: Any) -> typer.Typer:
    """Return the Typer application of one subcommand."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **settings)


def complain(message: str) -> None:
    """Write an error for people."""
    err.print(Text.assemble(("Error: ", "bold red"), message))


def default_state_dir() -> Path:
    """Return where a local cluster keeps its state and logs, by the XDG rules."""
    base = environment().get("XDG_STATE_HOME")
    root = Path(base) if base else Path.home() / ".local" / "state"
    return root / "kvmesh"


StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        help="Where the cluster keeps its state and logs.",
        default_factory=default_state_dir,
        show_default="~/.local/state/kvmesh",
        file_okay=False,
        resolve_path=True,
    ),
]
