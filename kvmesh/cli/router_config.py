"""`kvmesh router config`: settings of routers that run, shown and changed."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvmesh.cli.console import CommandError, StateDir, err, out
from kvmesh.cli.settings import own_config
from kvmesh.cli.state import StateDir as State
from kvmesh.cli.survey import CONSUL_AGENT, ConsulAgent, Registry, found_in
from kvmesh.clock import SystemClock
from kvmesh.discovery import ROUTING_SETTINGS, DiscoveryConfig, FileText, SharedText, create

_EDIT_SECONDS = 60.0

_TRIES = 5
"""Others may write at the same time; nobody writes that often."""


def config(  # noqa: PLR0913 - a command's options
    *,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting, e.g. routing.policy=session or queue.max_requests=200."
            " Repeatable.",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Go back to what routers were started with, for a setting or a table of them."
            " Repeatable.",
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Go back to it for all settings.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show what is changed; so without any option.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(help="The routers' tuning.file, if they have one.", dir_okay=False),
    ] = None,
    discovery: Registry = None,
    consul_addr: ConsulAgent = CONSUL_AGENT,
    state_dir: StateDir,
) -> None:
    """Change settings of all routers while they run: sections routing and queue."""
    state = State(state_dir)
    own = own_config(found_in(state, state.read(), discovery, consul_addr))
    wanted = _pairs(sets or [])
    if clear and (wanted or unset):
        raise CommandError("--clear goes alone")
    asyncio.run(_run(own.discovery, file, wanted, unset or [], clear=clear, show=show))


async def _run(
    config: DiscoveryConfig,
    file: Path | None,
    sets: dict[str, str],
    unset: Sequence[str],
    *,
    clear: bool,
    show: bool,
) -> None:
    async with _kept(config, file) as text:
        if not (sets or unset or clear):
            document = (await text.read()).text
        else:
            document = await _change(text, sets, unset, clear=clear)
            err.print(f"Changed: {text.where}", style="dim", markup=False, highlight=False)
            if not show:
                return
    if document:
        out.print(document.rstrip("\n"), markup=False)
    else:
        err.print(f"Nothing is changed: {text.where}", style="dim", markup=False)


async def _change(
    text: SharedText, sets: dict[str, str], unset: Sequence[str], *, clear: bool
) -> str:
    """Write the edited document, and return it; tries again if somebody else was quicker."""
    for _ in range(_TRIES):
        stored = await text.read()
        document = "" if clear else await _edited(stored.text or "", sets, unset)
        if await text.write(document or None, stored.version):
            return document
    raise CommandError(f"somebody else keeps changing it: {text.where}")


async def _edited(document: str, sets: dict[str, str], unset: Sequence[str]) -> str:
    """Let the routers' own code edit a document. Raises CommandError for what it refuses."""
    asked = json.dumps({"document": document, "set": sets, "unset": list(unset)})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router.tuning"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_EDIT_SECONDS):
            edited, complaint = await process.communicate(asked.encode())
    except TimeoutError:
        raise CommandError("the settings could not be checked in time") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = complaint.decode().strip().splitlines()
        raise CommandError(lines[-1] if lines else f"exit code {process.returncode}")
    return edited.decode()


@asynccontextmanager
async def _kept(config: DiscoveryConfig, file: Path | None) -> AsyncIterator[SharedText]:
    if file is not None:
        yield FileText(file)
        return
    async with create(config, SystemClock(), random.Random()) as discovery:
        yield discovery.shared(ROUTING_SETTINGS)


def _pairs(items: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or "." not in key:
            raise CommandError(f"--set {item}: use section.field=value, e.g. routing.policy=kv")
        pairs[key] = value
    return pairs
