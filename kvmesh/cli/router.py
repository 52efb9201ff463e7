"""`kvmesh router decisions`: where requests were sent, and why."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from kvmesh.cli.console import StateDir, err, out, subcommand
from kvmesh.cli.decided import Made, follow, remembered
from kvmesh.cli.interrupts import Interrupted, interrupts, unless
from kvmesh.cli.procs import Running
from kvmesh.cli.router_config import config
from kvmesh.cli.settings import OwnConfig, own_config
from kvmesh.cli.state import StateDir as State
from kvmesh.cli.survey import CONSUL_AGENT, ConsulAgent, Registry, found_in, members_of, names_of
from kvmesh.rpc.decisions import OUTCOMES, DecisionQuery, ScoredWorker

app = subcommand(help="Ask the routers.", no_args_is_help=True)

Outcome = StrEnum("Outcome", {name.upper(): name for name in OUTCOMES})  # type: ignore[misc]

_STYLES = {"refused": "red", "cancelled": "yellow", "local": "cyan", "remote": "green"}

_ANSWER_IDS = ("chatcmpl-", "cmpl-")
"""What the ids of answers begin with; the rest is the request's."""

_COLUMNS = (
    ("time", 12),
    ("router", 10),
    ("request", 32),
    ("model", 8),
    ("outcome", 9),
    ("reason", 10),
    ("policy", 6),
    ("decode", 10),
    ("prefill", 10),
    ("prompt", 6),
    ("expected", 8),
    ("cached", 6),
    ("waited", 8),
)
"""Headings, and the least width of each."""

_NUMBERS = frozenset({"prompt", "expected", "cached", "waited"})

_WIDE = 150
"""Columns of a terminal that has room for all."""

_ONLY_WIDE = frozenset({"router", "model", "policy", "expected"})


app.command("config")(config)


@app.callback()
def router() -> None:
    """Ask the routers."""


@app.command("decisions")
def decisions(  # noqa: PLR0913 - a command's options
    *,
    follow_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with decisions to come.")
    ] = False,
    model: Annotated[str, typer.Option(help="Only of this model.")] = "",
    worker: Annotated[
        str, typer.Option(help="Only those that chose this worker, to decode or to prefill.")
    ] = "",
    request: Annotated[
        str, typer.Option(help="Only of this request: its id, or that of its answer.")
    ] = "",
    policy: Annotated[str, typer.Option(help="Only by this policy.")] = "",
    outcome: Annotated[
        list[Outcome] | None, typer.Option(help="Only with this outcome. Repeatable.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="The newest so many of those made.", min=0)
    ] = 50,
    candidates: Annotated[
        bool, typer.Option("--candidates", "-c", help="Show the best candidates and scores too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, a line for each decision.")
    ] = False,
    discovery: Registry = None,
    consul_addr: ConsulAgent = CONSUL_AGENT,
    state_dir: StateDir,
) -> None:
    """Show where requests were sent, and why: the last decisions of all routers."""
    state = State(state_dir)
    cluster = state.read()
    own = own_config(found_in(state, cluster, discovery, consul_addr))
    for prefix in _ANSWER_IDS:
        request = request.removeprefix(prefix)
    chosen = [one.value for one in outcome or ()]
    query = DecisionQuery(model, worker, policy, request, chosen, limit, follow_on)
    show = _Json() if as_json else _Lines(candidates=candidates)
    asyncio.run(_run(own, query, cluster.processes if cluster else (), show))


async def _run(
    own: OwnConfig, query: DecisionQuery, started: Sequence[Running], show: "_Lines | _Json"
) -> None:
    with interrupts() as asked:
        try:
            await unless(asked.first, _show(own, query, started, show))
        except Interrupted:
            return


async def _show(
    own: OwnConfig, query: DecisionQuery, started: Sequence[Running], show: "_Lines | _Json"
) -> None:
    def notice(message: str) -> None:
        err.print(message, style="dim", markup=False)

    members = await members_of(own.discovery)
    show.names = names_of(members, started)
    ids = {name: member_id for member_id, name in show.names.items()}
    query = replace(query, worker_id=ids.get(query.worker_id, query.worker_id))
    made = await remembered(members, own.rpc, query, notice)
    show.these(made)
    if query.follow:
        await follow(own, query, made, lambda one: show.these([one]), notice)
    elif not made:
        notice("no such decision is remembered")


class _Json:
    """A line for each decision. Processes are called by their ids."""

    names: Mapping[str, str] = {}

    def these(self, made: Sequence[Made]) -> None:
        """Print them."""
        for one in made:
            time = datetime.fromtimestamp(one.decision.time, UTC).isoformat()
            shown = {"router": one.router, **asdict(one.decision), "time": time}
            typer.echo(json.dumps(shown))


class _Lines:
    """Columns that widen as what is in them does."""

    def __init__(self, *, candidates: bool) -> None:
        self.names: Mapping[str, str] = {}
        """What processes are called, by id; others are called by their ids."""
        self._candidates = candidates
        self._wide = out.width >= _WIDE
        self._widths = [width for _, width in _COLUMNS]
        self._headed = False

    def these(self, made: Sequence[Made]) -> None:
        """Print them, below headings."""
        rows = [(one, self._cells(one)) for one in made]
        for _, cells in rows:
            pairs = zip(self._widths, cells, strict=True)
            self._widths = [max(width, len(cell)) for width, cell in pairs]
        if rows and not self._headed:
            self._headed = True
            out.print(self._line([name for name, _ in _COLUMNS], "bold"))
        for one, cells in rows:
            out.print(self._line(cells, "", _STYLES.get(one.decision.outcome, "")))
            if self._candidates:
                for role in ("decode", "prefill"):
                    for scored in getattr(one.decision, f"{role}_candidates"):
                        name = self._name(scored.worker_id)
                        out.print(_candidate(role, name, scored), style="dim", markup=False)

    def _line(self, cells: Sequence[str], style: str, outcome_style: str = "") -> Text:
        line = Text(style=style)
        for (name, _), width, cell in zip(_COLUMNS, self._widths, cells, strict=True):
            if name in _ONLY_WIDE and not self._wide:
                continue
            padded = cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            line.append(padded + "  ", outcome_style if name == "outcome" else None)
        line.rstrip()
        return line

    def _cells(self, made: Made) -> list[str]:
        one = made.decision
        local = datetime.fromtimestamp(one.time, UTC).astimezone()
        planned = bool(one.decode)
        waited = f"{one.waited_seconds:.3f} s" if one.queue_position else "-"
        return [
            f"{local:%H:%M:%S}.{local.microsecond // 1000:03}",
            self._name(made.router),
            one.request_id or "-",
            one.model,
            one.outcome,
            one.reason,
            one.policy or "-",
            self._name(one.decode),
            self._name(one.prefill),
            str(one.prompt_tokens),
            str(one.expected_cached_tokens) if planned else "-",
            "-" if one.cached_tokens is None else str(one.cached_tokens),
            waited,
        ]

    def _name(self, member_id: str) -> str:
        return self.names.get(member_id, member_id) or "-"


def _candidate(role: str, name: str, scored: ScoredWorker) -> str:
    return (
        f"    {role} {name}: score {scored.score:.6g}, {scored.cached_tokens} tokens"
        f" cached, {scored.load_blocks:.0f} blocks of work, {scored.requests} requests"
    )
