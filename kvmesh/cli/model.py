"""`kvmesh model`: the models on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvmesh import models
from kvmesh.cli.console import out, subcommand
from kvmesh.cli.models import cache, fetch

app = subcommand(no_args_is_help=True, help="Fetch and list models.")


@app.command("fetch")
def fetch_model(
    name: Annotated[
        str, typer.Argument(help=f"{models.SMOLLM2}, or tiny: a tokenizer for the engine sim.")
    ] = models.SMOLLM2,
    directory: Annotated[
        Path | None, typer.Option(help="Where to keep it.", show_default="the cache")
    ] = None,
) -> None:
    """Fetch a model, check it, convert it once, and print its folder."""
    out.print(str(fetch(name, directory or cache())), markup=False)


@app.command("list")
def list_models() -> None:
    """List the models in the cache."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "context", "vocabulary", "folder"):
        table.add_column(title, no_wrap=True)
    for path in sorted(cache().glob("*/config.json")):
        info = models.read_info(path.parent)
        table.add_row(info.name, str(info.context_length), str(info.vocab_size), str(path.parent))
    if not table.row_count:
        out.print(f"none yet: `kvmesh model fetch` gets {models.SMOLLM2}")
    else:
        out.print(table)
