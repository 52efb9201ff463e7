"""`kvmesh status`: every process of a cluster."""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvmesh.cli.console import StateDir, err, out, subcommand
from kvmesh.cli.procs import Running
from kvmesh.cli.settings import own_config
from kvmesh.cli.state import ClusterState
from kvmesh.cli.state import StateDir as State
from kvmesh.cli.survey import CONSUL_AGENT, ConsulAgent, Registry, Seen, found_in, survey
from kvmesh.cli.view import STATE_STYLES

app = subcommand()

_WIDE = 110
"""Columns of a terminal that has room for model and epoch."""

_NARROW = 7
"""Characters of a heading, and what it holds, where there is less room."""


@app.command("status")
def status(
    state_dir: StateDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    discovery: Registry = None,
    consul_addr: ConsulAgent = CONSUL_AGENT,
) -> None:
    """Show every process of a cluster; the exit code is 1 when nothing runs."""
    state = State(state_dir)
    cluster = state.read()
    found_by = found_in(state, cluster, discovery, consul_addr)
    started = cluster.processes if cluster else ()
    seen = asyncio.run(survey(own_config(found_by), started))
    gone = [process for process in started if not process.is_alive()]
    if as_json:
        # Not through the console: it would colour and wrap.
        typer.echo(json.dumps(_document(cluster, seen, gone), indent=2))
    else:
        _print(cluster, seen, gone)
    raise typer.Exit(0 if seen else 1)


def _document(
    cluster: ClusterState | None, seen: Sequence[Seen], gone: Sequence[Running]
) -> dict[str, object]:
    return {
        "engine": cluster.engine if cluster else "",
        "model": cluster.model if cluster else "",
        "http": list(cluster.http) if cluster else [],
        "grpc": list(cluster.grpc) if cluster else [],
        "processes": [item.as_json() for item in seen],
        "gone": [
            {"name": process.name, "pid": process.pid, "log": str(process.log)} for process in gone
        ],
    }


def _print(cluster: ClusterState | None, seen: Sequence[Seen], gone: Sequence[Running]) -> None:
    if not seen:
        out.print("Nothing runs here: `kvmesh up` starts a cluster.")
        return
    out.print(_table(seen))
    for process in gone:
        err.print(f"{process.name} (pid {process.pid}) is gone; its log: {process.log}")
    if cluster:
        out.print(f"\nmodel  {cluster.model} on the engine {cluster.engine}", style="dim")
        out.print(f"REST   {', '.join(cluster.http)}", style="dim")
        out.print(f"gRPC   {', '.join(cluster.grpc)}", style="dim")


def _table(seen: Sequence[Seen]) -> Table:
    wide = out.width >= _WIDE
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("process", "pid", "state", "address", *(("model", "epoch") if wide else ())):
        table.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "blocks", "tickets", "received"):
        table.add_column(title if wide else title[:_NARROW], no_wrap=True, justify="right")
    for item in seen:
        member = item.member
        table.add_row(
            item.name,
            str(member.pid or ""),
            Text(member.state, style=STATE_STYLES.get(member.state, "")),
            member.address,
            *((member.model, member.epoch[:8]) if wide else ()),
            *_load(item),
        )
    return table


def _load(item: Seen) -> tuple[str, ...]:
    load = item.load
    if load is None:
        return ("",) * 5
    return (
        str(load.running),
        str(load.waiting),
        f"{load.used_blocks}/{load.total_blocks}",
        _bytes(load.ticket_bytes),
        _bytes(load.received_bytes),
    )


def _bytes(count: int) -> str:
    value, units = float(count), ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
