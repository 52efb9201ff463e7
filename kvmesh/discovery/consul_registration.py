"""One member's registration with Consul, kept up by one task."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvmesh.clock import Clock
from kvmesh.discovery.consul_client import ConsulClient
from kvmesh.discovery.consul_index import backoff
from kvmesh.discovery.consul_service import alive_check, ready_check
from kvmesh.discovery.entry import Entry
from kvmesh.errors import UnavailableError
from kvmesh.types import Member, State

STORE_SECONDS = 5.0
"""How long a caller waits for Consul to take a state."""

LEAVE_SECONDS = 2.0
"""How long leaving may take. Where it fails the TTL ends the entry."""

BEATS_PER_TTL = 4

_log = logging.getLogger(__name__)


class ConsulRegistration:
    """Wants an entry to be stored, and does what it takes. `run` is its only task.

    Whatever fails, the answer is to register afresh: that covers an agent that was away,
    one that restarted empty, and one that reaped us.
    """

    def __init__(
        self,
        client: ConsulClient,
        describe: Callable[[Entry], dict[str, Any]],
        member: Member,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._client = client
        self._describe = describe
        self._entry = Entry(member, 0)
        self._clock = clock
        self._rng = rng
        self._wanted = 1
        self._settled = 0
        self._is_stored = False
        self._leaving = False
        self._asked_at: float | None = None
        self._troubled_at = float("-inf")
        self._wake = asyncio.Event()
        self._progress = asyncio.Condition()

    def troubled(self, seconds: float, since: float) -> bool:
        """Return whether Consul let this process wait for so long, or failed it, since then.

        It may think others dead, too, whose heartbeats it has kept waiting.
        """
        asked_at = self._asked_at
        waits = asked_at is not None and self._clock.now() - asked_at >= seconds
        return waits or self._troubled_at >= since

    async def set_state(self, state: State) -> None:
        """Store a new state. Raises UnavailableError after `STORE_SECONDS`; tries go on."""
        self._entry = replace(self._entry, member=replace(self._entry.member, state=state))
        self._wanted += 1
        self._wake.set()
        await self.stored()

    async def stored(self) -> None:
        """Wait until what is wanted now is stored. Raises UnavailableError when time is up."""
        wanted = self._wanted
        try:
            async with asyncio.timeout(STORE_SECONDS), self._progress:
                await self._progress.wait_for(lambda: self._settled >= wanted)
        except TimeoutError:
            raise UnavailableError(f"Consul hasn't stored {self._entry.member.id} yet") from None

    async def run(self, beat_seconds: float) -> None:
        """Store, then beat, until `leave`. Survives every failure."""
        failures = 0
        while not self._leaving:
            self._wake.clear()
            self._asked_at = self._clock.now()
            try:
                await self._step()
                if self._clock.now() - self._asked_at >= beat_seconds:
                    self._troubled_at = self._clock.now()
                if failures:
                    _log.info("%s is registered with Consul again", self._entry.member.id)
                failures = 0
            except UnavailableError as error:
                failures = self._failed(failures, error)
            except Exception as error:  # noqa: BLE001 - the top of a task that must not die
                failures = self._failed(failures, error)
            self._asked_at = None
            pause = backoff(failures, self._rng) if failures else beat_seconds
            await self._rest(pause)

    async def leave(self, task: asyncio.Task[None]) -> None:
        """End `run`, which is `task`, and withdraw the entry if it is still ours."""
        self._leaving = True
        self._wake.set()
        # A step is left to end by itself: cut off, it could still register us afterwards.
        try:
            await asyncio.wait((task,), timeout=LEAVE_SECONDS)
        finally:
            task.cancel()
        await asyncio.wait((task,))
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                meta = await self._client.service_meta(self._entry.member.id)
                if meta is not None and meta.get("epoch") == self._entry.member.epoch:
                    await self._client.deregister(self._entry.member.id)
        except (UnavailableError, TimeoutError) as error:
            _log.warning("%s is not deregistered: %s", self._entry.member.id, error)

    async def _step(self) -> None:
        if self._is_stored and self._settled >= self._wanted:
            await self._client.check_passes(alive_check(self._entry.member), "")
            return
        wanted = self._wanted
        await self._store()
        async with self._progress:
            self._settled = wanted
            self._progress.notify_all()

    async def _store(self) -> None:
        rival = await self._rival_since()
        if self._entry.since == 0:
            # Not earlier than a former life, even if the clock was set back since.
            since = max(int(self._clock.wall() * 1000), rival + 1)
            self._entry = replace(self._entry, since=since)
        elif rival > self._entry.since:
            # A newer life has the id. Should it go, we are there again at the next beat.
            self._is_stored = False
            return
        entry = self._entry
        await self._client.register(self._describe(entry))
        # Registering again leaves the status of checks as it was.
        check = ready_check(entry.member)
        if entry.member.state is State.READY:
            await self._client.check_passes(check, entry.member.state)
        else:
            await self._client.check_fails(check, entry.member.state)
        self._is_stored = True

    async def _rival_since(self) -> int:
        """Return when another life of this id was registered, 0 if there is none."""
        meta = await self._client.service_meta(self._entry.member.id)
        if meta is None or meta.get("epoch") == self._entry.member.epoch:
            return 0
        since = meta.get("since", "")
        return int(since) if since.isascii() and since.isdigit() else 0

    def _failed(self, failures: int, error: Exception) -> int:
        self._is_stored = False
        self._troubled_at = self._clock.now()
        level = logging.WARNING if failures == 0 else logging.DEBUG
        unexpected = None if isinstance(error, UnavailableError) else error
        message = "%s is not registered with Consul for now: %s"
        _log.log(level, message, self._entry.member.id, error, exc_info=unexpected)
        return failures + 1

    async def _rest(self, seconds: float) -> None:
        """Rest, but not while something new is to be stored and all was well."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
