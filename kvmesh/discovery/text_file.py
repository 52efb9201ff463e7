"""A shared text in a file, looked at again and again: no file system tells of all changes."""

import asyncio
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmesh.discovery.base import Stored
from kvmesh.errors import UnavailableError

LOOK_SECONDS = 0.5
"""A look costs one system call. A change is taken up at the second look that finds it."""

MAX_BYTES = 64 * 1024
"""Of a longer file no more is read: whoever it is for refuses it."""

_Mark = tuple[int, int, int, int]

log = logging.getLogger(__name__)


class FileText:
    """The content of one file. Its directory need not be there."""

    def __init__(self, path: Path, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._path = path
        self._look_seconds = look_seconds

    @property
    def where(self) -> str:
        """The path."""
        return str(self._path)

    async def watch(self) -> AsyncIterator[str | None]:
        """Look at the file; yield what is new once it has stayed the same for a look.

        So a file that an editor is about to replace is not seen half written, or missing.
        """
        looked = _Look()
        while True:
            try:
                if looked.settled(self._mark()):
                    text = self._read()
                    if not looked.shown or text != looked.text:
                        looked.shown, looked.text = True, text
                        yield text
                looked.failing = False
            except OSError as error:
                if not looked.failing:
                    log.warning("what was read last stands: %s: %s", self._path, error)
                looked.failing = True
            await asyncio.sleep(self._look_seconds)

    async def read(self) -> Stored:
        """Return the content. Raises UnavailableError."""
        try:
            return self._stored()
        except OSError as error:
            raise UnavailableError(f"{self._path} can't be read: {error.strerror}") from error

    async def write(self, text: str | None, version: str) -> bool:
        """Replace the file whole, or remove it. Raises UnavailableError."""
        try:
            return self._write(text, version)
        except BlockingIOError:
            return False  # somebody else is writing: it won't be of that version for long
        except OSError as error:
            raise UnavailableError(f"{self._path} can't be written: {error.strerror}") from error

    def _stored(self) -> Stored:
        self._mark()
        text = self._read()
        return Stored(text, "" if text is None else hashlib.sha256(text.encode()).hexdigest())

    def _write(self, text: str | None, version: str) -> bool:
        path = Path(os.path.realpath(self._path))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path):
            if self._stored().version != version:
                return False
            if text is None:
                path.unlink(missing_ok=True)
            else:
                _replace(path, text)
        return True

    def _mark(self) -> _Mark | None:
        """Return what differs when the file does, None if there is none. Raises OSError."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "not a regular file")
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> str | None:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_BYTES + 1).decode("utf-8", "replace")
        except FileNotFoundError:
            return None


class _Look:
    """What was seen so far."""

    def __init__(self) -> None:
        self.shown = False
        self.text: str | None = None
        self.failing = False
        self._last: _Mark | None = None
        self._read: _Mark | None = None

    def settled(self, mark: _Mark | None) -> bool:
        """Whether the file is to be read now: it is another than was read, and no newer."""
        first, same = not self.shown, mark == self._last
        self._last = mark
        if first or (same and mark != self._read):
            self._read = mark
            return True
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(f".{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
