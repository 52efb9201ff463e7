"""`kvmesh up`: start a local cluster."""

import asyncio
import random
from pathlib import Path
from typing import Annotated

import typer

from kvmesh import models
from kvmesh.cli.checking import check_overrides
from kvmesh.cli.console import CommandError, StateDir, subcommand
from kvmesh.cli.models import TINY, prepare
from kvmesh.cli.plan import DiscoveryChoice, Engine, Layout, Served, plan
from kvmesh.cli.session import Session, run
from kvmesh.cli.settings import own_config, parse_overrides
from kvmesh.cli.state import ClusterState
from kvmesh.cli.state import StateDir as State
from kvmesh.cli.survey import members_of
from kvmesh.clock import SystemClock
from kvmesh.types import Role

app = subcommand()

_PROCESSES = "How many processes"
_NETWORK = "Network"


def _count(role: Role, least: int = 1) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{role}", help=f"{role.capitalize()} processes.", min=least, max=64,
        rich_help_panel=_PROCESSES,
    )  # fmt: skip
    return option


@app.command("up")
def up(  # noqa: PLR0913 - a command's options
    *,
    engine: Annotated[Engine, typer.Option(help="What computes the tokens.")] = Engine.VLLM,
    model: Annotated[
        str,
        typer.Option(
            help="Folder in Hugging Face layout, or a name that can be fetched.",
            show_default=f"{models.SMOLLM2}; sim: a tiny one",
        ),
    ] = "",
    prefill: Annotated[int, _count(Role.PREFILL, 0)] = 1,
    decode: Annotated[int, _count(Role.DECODE)] = 1,
    router: Annotated[int, _count(Role.ROUTER)] = 1,
    tokenizer: Annotated[int, _count(Role.TOKENIZER)] = 1,
    frontend: Annotated[int, _count(Role.FRONTEND)] = 1,
    http_port: Annotated[
        int,
        typer.Option(
            help="REST port; further frontends count up.",
            min=1,
            max=65535,
            rich_help_panel=_NETWORK,
        ),
    ] = 8000,
    grpc_port: Annotated[
        int,
        typer.Option(
            help="gRPC port; further frontends count up.",
            min=1,
            max=65535,
            rich_help_panel=_NETWORK,
        ),
    ] = 9000,
    discovery: Annotated[
        DiscoveryChoice,
        typer.Option(help="How the processes find each other.", rich_help_panel=_NETWORK),
    ] = DiscoveryChoice.LOCAL,
    consul_addr: Annotated[
        str, typer.Option(help="HTTP address of the Consul agent.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1:8500",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[ROLE:]KEY=VALUE",
            help="Set anything else, e.g. rpc.drain_seconds=60 or "
            "decode:telemetry.log_level=debug. Repeatable.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave the cluster running and return.")
    ] = False,
    chat: Annotated[bool, typer.Option(help="Ask for a sample answer when it is up.")] = True,
    timeout: Annotated[
        float, typer.Option(help="Seconds that starting may take.", min=1.0)
    ] = 900.0,
    state_dir: StateDir,
) -> None:
    """Start a local cluster, wait until it answers, and show how to use it.

    Ctrl-C stops it in order, running requests first; a second Ctrl-C stops it at once.
    """
    state = State(state_dir)
    overrides = parse_overrides(settings or [])
    counts = {
        Role.PREFILL: prefill,
        Role.DECODE: decode,
        Role.ROUTER: router,
        Role.TOKENIZER: tokenizer,
        Role.FRONTEND: frontend,
    }
    layout = Layout(counts, http_port, grpc_port)
    found_by = _discovery(discovery, consul_addr, state)
    own = own_config(found_by, overrides)
    with state.locked():
        _check_unused(state)
        layout.check_ports()
        if discovery is DiscoveryChoice.CONSUL:
            asyncio.run(members_of(own.discovery))
        folder = prepare(engine, model)
        info = models.read_info(folder)
        readable = models.TINY_FIRST_READABLE if info.name == TINY else None
        planned = plan(layout, engine, Served(folder, info, readable), found_by, overrides)
        check_overrides(overrides, planned)
        cluster = ClusterState(
            engine=engine.value,
            model=info.name,
            model_path=str(folder),
            discovery=found_by,
            http=layout.http(),
            grpc=layout.grpc(),
            drain_seconds=own.rpc.drain_seconds,
        )
        session = Session(
            state, cluster, own, SystemClock(), random.Random(), timeout=timeout, sample=chat
        )
        raise typer.Exit(asyncio.run(run(session, planned, overrides, detach=detach)))


def _discovery(choice: DiscoveryChoice, consul_addr: str, state: State) -> dict[str, str]:
    if choice is DiscoveryChoice.CONSUL:
        return {"kind": choice.value, "consul_address": consul_addr}
    return {"kind": choice.value, "directory": str(state.members)}


def _check_unused(state: State) -> None:
    cluster = state.read()
    if cluster is not None and (alive := cluster.alive()):
        raise CommandError(
            f"a cluster of {len(alive)} processes runs already ({Path(state.path)}): "
            "stop it with `kvmesh down`, or give another --state-dir and other ports"
        )
