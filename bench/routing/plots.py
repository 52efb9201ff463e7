"""Figures as PNG files. Needs matplotlib: the extra `bench`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.routing.prefill import Compared
from bench.routing.report import Summary

Value = Callable[[Summary], float]

PANELS: Sequence[tuple[str, Value, bool]] = (
    ("hit rate", lambda s: s.hit_rate, False),
    ("TTFT p50, ms", lambda s: s.ttft_p50 * 1e3, True),
    ("TTFT p99, ms", lambda s: s.ttft_p99 * 1e3, True),
    ("goodput, share of requests", lambda s: s.good, False),
    ("busiest worker / mean", lambda s: s.imbalance, False),
    ("decision p99, ms", lambda s: s.decision_p99 * 1e3, False),
)
"""What is drawn of policies: a name, a figure of a summary, whether on a log scale."""

LINES: Sequence[tuple[str, Callable[[Compared], Mapping[str, float]]]] = (
    ("mean TTFT, s", lambda c: c.ttft),
    ("p99 between tokens, s", lambda c: c.gap_p99),
)
"""What is drawn of where prompts are computed: a name and a figure of a cell."""


def draw_policies(path: Path, title: str, found: Mapping[str, Mapping[str, Summary]]) -> None:
    """Draw bars for each policy of each workload, a panel for each figure."""
    figure = Figure(figsize=(15, 7))
    axes = figure.subplots(2, 3)
    policies = list(next(iter(found.values())))
    width = 0.8 / len(policies)
    for axis, (name, value, log) in zip(axes.flat, PANELS, strict=True):
        for number, policy in enumerate(policies):
            at = [place + number * width for place in range(len(found))]
            axis.bar(at, [value(each[policy]) for each in found.values()], width, label=policy)
        axis.set_title(name)
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(found))], list(found))
        if log:
            axis.set_yscale("log")
    axes.flat[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_prefill(
    path: Path, title: str, found: Mapping[str, Sequence[tuple[float, Compared]]]
) -> None:
    """Draw, for each kind of prompts, figures over the load, a line for each mode."""
    figure = Figure(figsize=(4 * len(found), 7))
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (prompts, points) in enumerate(found.items()):
        for row, (name, value) in enumerate(LINES):
            axis = axes[row][column]
            for mode in value(points[0][1]):
                axis.plot(
                    [load for load, _ in points],
                    [value(each)[mode] for _, each in points],
                    marker="o",
                    label=mode,
                )
            axis.set_yscale("log")
            axis.set_title(f"{prompts}: {name}", fontsize="small")
            axis.set_xlabel("load")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
