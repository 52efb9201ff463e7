"""`kvmesh chat "prompt"`: ask the model of a running cluster."""

import asyncio
import sys
from typing import Annotated

import typer

from kvmesh.cli import rest
from kvmesh.cli.console import CommandError, StateDir, err, out, subcommand
from kvmesh.cli.guide import API_KEY_VARIABLE
from kvmesh.cli.state import StateDir as State

app = subcommand()


@app.command("chat")
def chat(  # noqa: PLR0913 - a command's options
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    *,
    url: Annotated[
        str, typer.Option(help="Frontend to ask, e.g. http://127.0.0.1:8000; else the local one.")
    ] = "",
    model: Annotated[str, typer.Option(help="Model to ask; else the first one served.")] = "",
    system: Annotated[str, typer.Option(help="What to tell the model before.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="0: the likeliest answer, always the same.", min=0.0)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest silence, in seconds.", min=0.1)] = 120.0,
    api_key: Annotated[
        str,
        typer.Option(help="Key to show, where one is wanted.", envvar=API_KEY_VARIABLE),
    ] = "",
    state_dir: StateDir,
) -> None:
    """Ask the model; the answer is shown as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    ask = rest.Ask(messages, max_tokens, temperature, timeout, api_key)
    address = url.rstrip("/").removesuffix("/v1") or _local_frontend(State(state_dir))
    try:
        asyncio.run(_show(address, model, ask))
    except KeyboardInterrupt:  # enough heard: leaving cancels the request
        out.print()
        err.print("interrupted", style="dim")
        raise typer.Exit(130) from None


async def _show(url: str, model: str, ask: rest.Ask) -> None:
    served = model or await rest.first_model(url, ask.api_key)
    begun = False
    try:
        async for text in rest.chat(url, served, ask):
            out.print(text, end="", markup=False)
            begun = True
    finally:
        if begun:
            out.print()


def _local_frontend(state: State) -> str:
    cluster = state.read()
    urls = cluster.live_urls() if cluster else []
    if not urls:
        raise CommandError(
            "no frontend runs here: start a cluster with `kvmesh up`, or name one with --url"
        )
    return urls[0]
