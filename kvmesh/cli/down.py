"""`kvmesh down`: stop a local cluster."""

import asyncio
from typing import Annotated

import typer

from kvmesh.cli.console import StateDir, err, out, subcommand
from kvmesh.cli.interrupts import Interrupted, interrupts, unless
from kvmesh.cli.procs import Running
from kvmesh.cli.state import StateDir as State
from kvmesh.cli.stopping import kill, stop
from kvmesh.clock import SystemClock

app = subcommand()


@app.command("down")
def down(
    state_dir: StateDir,
    now: Annotated[bool, typer.Option("--now", help="Kill it; running requests are lost.")] = False,
) -> None:
    """Stop the local cluster in order: requests that run may end first."""
    state = State(state_dir)
    cluster = state.read()
    alive = cluster.alive() if cluster else []
    if cluster is None or not alive:
        state.clear()
        out.print("Nothing runs here.")
        return
    out.print(f"Stopping {len(alive)} processes.")
    asyncio.run(_down(alive, 0.0 if now else cluster.drain_seconds, now=now))
    state.clear()
    out.print("Stopped.")


async def _down(alive: list[Running], drain_seconds: float, *, now: bool) -> None:
    clock = SystemClock()
    with interrupts() as caught:
        if not now:
            try:
                await unless(caught.first, stop(alive, drain_seconds, clock, _tell))
            except Interrupted:
                err.print("Killing what is left.")
        await kill(alive, clock)


def _tell(text: str) -> None:
    err.print(text, markup=False)
