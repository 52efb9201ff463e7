"""A file that is published whole and locked as long as its owner lives."""

import fcntl
import os
import weakref
from pathlib import Path


class LockedFile:
    """Publishes bytes under one name, under an exclusive lock that the kernel ends.

    Every version is locked before it gets the name, so a reader who finds the name's
    file unlocked knows that its owner is dead. Only one owner may ever use a name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        _open_files.add(self)

    def publish(self, content: bytes) -> None:
        """Write and lock a new file, then give it the name. Raises OSError."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(fd, "wb", closefd=False) as file:
                file.write(content)
            temporary.replace(self._path)
        except BaseException:
            os.close(fd)
            raise
        # The old file's lock goes last: by now the name belongs to the new one.
        self.release()
        self._fd = fd

    def is_published(self) -> bool:
        """Tell whether the name still leads to our file."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return False

    def withdraw(self) -> None:
        """Remove the name and end the lock. Raises OSError."""
        try:
            self._path.unlink(missing_ok=True)
        finally:
            self.release()

    def release(self) -> None:
        """End the lock, as death would."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def owner_is_dead(fd: int) -> bool:
    """Tell whether nobody holds the lock of an open file. Never blocks."""
    try:
        # Shared, so that many readers who look at once don't take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


_open_files: "weakref.WeakSet[LockedFile]" = weakref.WeakSet()


def _forget_after_fork() -> None:
    """Close what a forked child inherits: it would hold its dead parent's locks."""
    for file in list(_open_files):
        file.release()


os.register_at_fork(after_in_child=_forget_after_fork)
