"""Model folders for a cluster, with a progress bar where one has to be fetched."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from kvmesh import models
from kvmesh.cli.console import err
from kvmesh.cli.plan import Engine
from kvmesh.config import environment

TINY = "tiny"
"""Name of the generated model that the simulated engine serves: a tokenizer without weights."""

_STAGES = {
    "wait": "waiting for another process that fetches it",
    "download": "downloading",
    "verify": "checking its SHA-256",
    "unpack": "unpacking",
    "convert": "converting (once)",
    "done": "done",
}


def cache() -> Path:
    """Return where models are kept."""
    return models.default_cache(environment())


def prepare(engine: Engine, model: str) -> Path:
    """Return the folder of a model, fetched or made first if need be; "" is the default.

    Blocks. Raises `ModelError`.
    """
    return fetch(model or (TINY if engine is Engine.SIM else models.SMOLLM2), cache())


def fetch(model: str, directory: Path) -> Path:
    """Return the folder of a model, in `directory` if it is none yet, showing what is done.

    Raises `ModelError`.
    """
    if model == TINY:
        return models.tiny_folder(directory / TINY)
    if (directory / model / "config.json").is_file():
        return directory / model
    with _progress(model) as tell:
        return models.resolve(model, directory, tell)


@contextmanager
def _progress(model: str) -> Iterator[models.Progress]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    bars = Progress(*columns, TaskProgressColumn(), Elapsed(), console=err, transient=True)
    task = None

    def tell(stage: str, done: float | None) -> None:
        nonlocal task
        text = f"{model}: {_STAGES.get(stage, stage)}"
        if task is None:
            bars.start()
            task = bars.add_task(text, total=None)
        if not err.is_terminal and bars.tasks[0].description != text:
            err.print(text, markup=False)
        bars.update(task, description=text, completed=done or 0.0, total=done and 1.0)

    try:
        yield tell
    finally:
        if task is not None:
            bars.stop()
