"""Ctrl-C and its kin as events: once to stop in order, twice to stop at once."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):  # noqa: N818 - not an error: the user's wish
    """Someone asked this command to stop."""


class Interrupts:
    """Counts what comes. `first` and `second` are set by the first and the second signal."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def add(self) -> None:
        """Count one more."""
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Catch the signals that mean "stop" while this is open; needs a running event loop."""
    loop, caught = asyncio.get_running_loop(), Interrupts()
    for number in _SIGNALS:
        loop.add_signal_handler(number, caught.add)
    try:
        yield caught
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; once the event is set, cancel it and raise Interrupted."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
    if task.cancelled():
        raise Interrupted
    return task.result()
