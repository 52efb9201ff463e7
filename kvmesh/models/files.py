"""Folders that appear whole or not at all, and locks between processes."""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmesh.models.info import ModelError

_LOCK_POLL = 0.2  # seconds


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the block ends well.

    Where `path` exists by then, as made by another process, that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield draft
        draft.chmod(0o755)
        try:
            draft.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def lock(path: Path, timeout: float, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the file lock `path`; the kernel frees it if the process dies.

    Calls `waiting` once if another process has it. Raises `ModelError` after `timeout`
    seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for attempt in range(max(1, int(timeout / _LOCK_POLL))):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 0:
                    waiting()
                time.sleep(_LOCK_POLL)
        else:
            raise ModelError(f"another process holds {path} for more than {timeout:.0f} s")
        yield
