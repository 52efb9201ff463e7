"""Entry of the `kvmesh` command: one module for each subcommand, loaded when it is used."""

import importlib
import logging
from typing import Any

import typer
from typer.core import TyperGroup

from kvmesh.cli.console import complain
from kvmesh.errors import MeshError

_COMMANDS = ("up", "down", "status", "chat", "model", "router", "serve", "health", "version")


class _Commands(TyperGroup):
    """Loads `kvmesh.cli.<name>` once it is asked for: a health check has to be quick."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the order of a newcomer's day."""
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load one command; None where there is none of this name."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"kvmesh.cli.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: kvmesh up",
)


@app.callback()
def kvmesh() -> None:
    """Run and use a kvmesh: disaggregated LLM inference over gRPC."""


def main() -> None:
    """Run the command line; what goes wrong is told in a sentence and exits with 1."""
    # Errors are told below; what the library logs on its way there would only repeat them.
    logging.getLogger("kvmesh").addHandler(logging.NullHandler())
    try:
        app(prog_name="kvmesh")
    except MeshError as error:
        complain(error.message)
        raise SystemExit(1) from None
