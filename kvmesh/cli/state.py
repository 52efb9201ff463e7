"""What a local cluster leaves on disk so that other commands find it.

<state-dir>/cluster.json   who was started, and how to reach them
<state-dir>/lock           held while `kvmesh up` runs
<state-dir>/members/       discovery of the kind `local`
<state-dir>/logs/          one file a process
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.cli.console import CommandError
from kvmesh.cli.procs import Running
from kvmesh.types import Role

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster as it was started.

    `discovery` holds settings of the section `discovery` that the processes were given,
    never a secret. `http` are URLs, `grpc` addresses, one for each frontend.
    """

    engine: str
    model: str
    model_path: str
    discovery: dict[str, str]
    http: tuple[str, ...]
    grpc: tuple[str, ...]
    drain_seconds: float
    processes: tuple[Running, ...] = field(default=())

    def alive(self) -> list[Running]:
        """Return the processes that still run."""
        return [process for process in self.processes if process.is_alive()]

    def live_urls(self) -> list[str]:
        """Return the URLs of the frontends that still run."""
        frontends = [process for process in self.processes if process.role is Role.FRONTEND]
        pairs = zip(frontends, self.http, strict=False)
        return [url for process, url in pairs if process.is_alive()]


class StateDir:
    """The directory. Nothing is made in it before something is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def members(self) -> Path:
        """Where the discovery of the kind `local` lives."""
        return self.path / "members"

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.path / "logs" / f"{name}.log"

    def read(self) -> ClusterState | None:
        """Return the cluster that was started here last; None where none was, or it was stopped."""
        try:
            text = self._file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _from_json(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{self._file} can't be read: {error}") from error

    def write(self, state: ClusterState) -> None:
        """Store the cluster; a reader sees the old one or the new one, whole."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._file.with_suffix(".json.tmp")
        document = {"format": _FORMAT, **asdict(state)}
        draft.write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
        draft.replace(self._file)

    def clear(self) -> None:
        """Forget the cluster; the logs stay."""
        self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory against another `kvmesh up`; raises CommandError if one has it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise CommandError(
                    f"another `kvmesh up` (pid {file.read().strip() or 'unknown'}) uses "
                    f"{self.path}: stop it first, or give another --state-dir"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    @property
    def _file(self) -> Path:
        return self.path / "cluster.json"


def _from_json(document: dict[str, Any]) -> ClusterState:
    if document.pop("format") != _FORMAT:
        raise ValueError("it was written by another version of kvmesh")
    processes = tuple(
        Running(
            name=item["name"],
            role=Role(item["role"]),
            pid=int(item["pid"]),
            started=int(item["started"]),
            log=Path(item["log"]),
        )
        for item in document.pop("processes")
    )
    http, grpc = tuple(document.pop("http")), tuple(document.pop("grpc"))
    return ClusterState(**document, http=http, grpc=grpc, processes=processes)
