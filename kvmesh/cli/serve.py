"""`kvmesh serve <role>`: become one process of a mesh."""

import os
import sys
from typing import Annotated

import typer

from kvmesh.cli.console import subcommand
from kvmesh.types import Role

app = subcommand()


@app.command(
    "serve",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def serve(
    role: Annotated[Role, typer.Argument(help="What the process does.")],
    flags: Annotated[
        list[str] | None,
        typer.Argument(help="The role's own flags; `kvmesh serve <role> --help` lists them."),
    ] = None,
) -> None:
    """Run one process of a mesh in the foreground, as containers and systemd do."""
    # The same process goes on, so signals and exit codes are the service's own.
    os.execv(sys.executable, [sys.executable, "-m", f"services.{role}", *(flags or [])])
