"""How a starting cluster is shown: a live table on a terminal, else a line for each change."""

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvmesh.cli.cluster import Child
from kvmesh.cli.procs import how_it_ended, last_lines

STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow"}


_PREFIX = re.compile(r"^\d{4}-\d\d-\d\dT\S+ [A-Z]+ \S+ \S+: ")
"""What our log lines begin with: time, level, role and logger."""


class View(Protocol):
    """Shows children while they start. A context manager: leaving it leaves the last picture."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; what was shown last stays."""
        ...

    def show(self, children: Sequence[Child]) -> None:
        """Show how things are now."""
        ...


def view(console: Console) -> View:
    """Return the view that suits a console."""
    return _LiveTable(console) if console.is_terminal else _Lines(console)


def state_of(child: Child) -> str:
    """Say in a word or two where a child is in its life."""
    if child.code is not None:
        return how_it_ended(child.code)
    return child.member.state.value if child.member else "starting"


class _LiveTable:
    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, children: Sequence[Child]) -> None:
        self._live.update(_table(children))


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, children: Sequence[Child]) -> None:
        for child in children:
            state = state_of(child)
            if self._shown.get(child.name) == state:
                continue
            self._shown[child.name] = state
            place = f" on {child.member.address}" if child.member else ""
            after = f" after {child.seconds:.1f} s" if state != "starting" else ""
            self._console.print(
                f"{child.name} (pid {child.running.pid}) {state}{place}{after}", markup=False
            )


def _table(children: Sequence[Child]) -> Table:
    table = Table(box=None, expand=True, header_style="bold", pad_edge=False)
    table.add_column("process", no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("address", no_wrap=True, min_width=15)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("last line of its log", ratio=1, no_wrap=True, overflow="ellipsis")
    for child in children:
        state = state_of(child)
        lines = last_lines(child.running.log, 1, 2048)
        table.add_row(
            child.name,
            str(child.running.pid),
            Text(state, style=STATE_STYLES.get(state, "red")),
            child.member.address if child.member else "",
            f"{child.seconds:.1f} s",
            Text(_PREFIX.sub("", lines[0]).expandtabs() if lines else "", style="dim"),
        )
    return table
