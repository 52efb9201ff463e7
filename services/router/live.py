"""Settings that change while the router runs: follows their document, applies what is valid."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress

from kvmesh.config import ConfigError
from kvmesh.discovery import SharedText
from kvmesh.telemetry import Meter
from services.router.plugins import Policies
from services.router.tuning import Tunable, changes, read

FIRST_SECONDS = 2.0
"""How long a router waits for the document before it serves with the settings it has."""

MAX_BACKOFF_SECONDS = 30.0

Apply = Callable[[Tunable, Policies], None]
"""Makes settings hold. Called between decisions, must not block."""

log = logging.getLogger(__name__)


class Live:
    """The settings in force: those of the start, with what the last valid document sets."""

    def __init__(self, base: Tunable, apply: Apply, meter: Meter) -> None:
        self.settings = base
        self.version = 0
        self._base = base
        self._apply = apply
        self._rejected = meter.counter(
            "kvmesh_router_config_rejected", "Changes of settings that were wrong and not taken."
        )
        meter.gauge(
            "kvmesh_router_config_version",
            "Changes of settings that were taken since the start.",
            lambda: self.version,
        )

    def take(self, document: str | None, source: str) -> bool:
        """Apply a document, None or empty for the settings of the start; or keep what holds.

        Returns whether it was valid. What is wrong with it is logged and counted.
        """
        try:
            settings, policies = read(self._base, document or "", source)
        except ConfigError as error:
            log.error("changed settings are not taken, those before stay: %s", error.message)
            self._rejected.add()
            return False
        if settings != self.settings:
            self._apply(settings, policies)
            self.settings = settings
            self.version += 1
            told = ", ".join(changes(self._base, settings)) or "those of the start"
            log.info("settings changed by %s, now: %s", source, told)
        return True

    async def follow(self, text: SharedText, rng: random.Random, first: asyncio.Event) -> None:
        """Apply each document as it comes. Survives every failure; runs until cancelled."""
        failures = 0
        while True:
            try:
                async with aclosing(text.watch()) as documents:  # type: ignore[type-var]
                    async for document in documents:
                        failures = 0
                        self._take_safely(document, text.where)
                        first.set()
            except Exception:  # the top of a task that must not die
                log.exception("changed settings can't be followed, those that hold stay")
            failures += 1
            pause = min(MAX_BACKOFF_SECONDS, 0.5 * 2.0 ** min(failures, 10))
            await asyncio.sleep(pause * rng.uniform(0.5, 1.0))

    def _take_safely(self, document: str | None, source: str) -> None:
        try:
            self.take(document, source)
        except Exception:  # top of a task; a plug-in, or what no parser was made for
            log.exception("changed settings of %s are not taken, those before stay", source)
            self._rejected.add()


@asynccontextmanager
async def following(live: Live, text: SharedText, rng: random.Random) -> AsyncIterator[None]:
    """Follow the document until the context is left; enters with what it says now.

    Where that can't be learned within `FIRST_SECONDS` it enters without.
    """
    first = asyncio.Event()
    task = asyncio.create_task(live.follow(text, rng, first), name="live settings")
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await first.wait()
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
