"""The options of `kvmesh up`, as types."""

from typing import Annotated

import typer

from kvmesh import models
from kvmesh.cli.plan import DiscoveryChoice, Engine
from kvmesh.types import Role

_PROCESSES = "How many processes"
_NETWORK = "Network"


def _count(role: Role, least: int = 1) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{role}",
        help=f"{role.capitalize()} processes.",
        min=least,
        max=64,
        rich_help_panel=_PROCESSES,
    )
    return option


def _port(what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        help=f"{what} port; further frontends count up.",
        min=1,
        max=65535,
        rich_help_panel=_NETWORK,
    )
    return option


EngineOption = Annotated[
    Engine | None,
    typer.Option(
        help="What computes the tokens.", show_default="vllm with an NVIDIA GPU, else torch"
    ),
]

ModelOption = Annotated[
    str,
    typer.Option(
        help="Folder in Hugging Face layout, or a name that can be fetched.",
        show_default=f"{models.SMOLLM2}; sim: a tiny one",
    ),
]

PrefillCount = Annotated[int, _count(Role.PREFILL, 0)]
DecodeCount = Annotated[int, _count(Role.DECODE)]
RouterCount = Annotated[int, _count(Role.ROUTER)]
TokenizerCount = Annotated[int, _count(Role.TOKENIZER)]
FrontendCount = Annotated[int, _count(Role.FRONTEND)]

HttpPort = Annotated[int, _port("REST")]
GrpcPort = Annotated[int, _port("gRPC")]

DiscoveryOption = Annotated[
    DiscoveryChoice,
    typer.Option(help="How the processes find each other.", rich_help_panel=_NETWORK),
]

ConsulAddress = Annotated[
    str, typer.Option(help="HTTP address of the Consul agent.", rich_help_panel=_NETWORK)
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[ROLE:]KEY=VALUE",
        help="Set anything else, e.g. rpc.drain_seconds=60 or decode:telemetry.log_level=debug. "
        "Repeatable.",
    ),
]

Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Leave the cluster running and return.")
]

Sample = Annotated[
    bool, typer.Option("--chat/--no-chat", help="Ask for a sample answer when it is up.")
]

StartTimeout = Annotated[float, typer.Option(help="Seconds that starting may take.", min=1.0)]
