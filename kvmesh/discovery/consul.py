"""Discovery through a Consul agent.

Processes keep a service alive with heartbeats (`consul_registration`); watchers follow one
blocking query for each role (`consul_index`). Last known members stand while the agent
can't be reached, and for a while after it came back without them.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self

from kvmesh.clock import Clock
from kvmesh.discovery.base import Registration
from kvmesh.discovery.config import DiscoveryConfig
from kvmesh.discovery.consul_client import ConsulClient
from kvmesh.discovery.consul_index import Cursor, Pace, Roster, backoff
from kvmesh.discovery.consul_registration import BEATS_PER_TTL, ConsulRegistration
from kvmesh.discovery.consul_service import from_services, to_service
from kvmesh.discovery.consul_text import ConsulText
from kvmesh.discovery.entry import Entry, newest
from kvmesh.errors import UnavailableError
from kvmesh.types import Member, Role

_log = logging.getLogger(__name__)


class ConsulDiscovery:
    """An async context manager that owns the connections to the agent."""

    def __init__(
        self,
        config: DiscoveryConfig,
        clock: Clock,
        rng: random.Random,
        *,
        pace: Pace | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._pace = pace or Pace()
        self._client = ConsulClient(config)
        self._registrations: list[ConsulRegistration] = []

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def register(self, member: Member) -> AsyncIterator[Registration]:
        """Register the member and keep it so.

        Enters within seconds even if Consul can't be reached: the entry appears once it
        can. Raises InvalidRequestError if Consul's metadata can't hold the member.
        """
        describe = partial(to_service, config=self._config)
        describe(Entry(member, 0))
        registration = ConsulRegistration(self._client, describe, member, self._clock, self._rng)
        beat_seconds = self._config.consul_ttl_seconds / BEATS_PER_TTL
        keeper = asyncio.create_task(registration.run(beat_seconds), name=f"consul {member.id}")
        self._registrations.append(registration)
        try:
            try:
                await registration.stored()
            except UnavailableError as error:
                _log.warning("%s; going on without", error)
            yield registration
        finally:
            self._registrations.remove(registration)
            await registration.leave(keeper)

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Follow all roles. The first snapshot comes when Consul has answered for each."""
        rosters: dict[Role, Roster] = {}
        changed = asyncio.Event()
        followers = [
            asyncio.create_task(self._follow(role, rosters, changed), name=f"consul {role}")
            for role in Role
        ]
        shown: tuple[Member, ...] | None = None
        try:
            while True:
                await changed.wait()
                changed.clear()
                members = newest(entry for roster in rosters.values() for entry in roster.entries)
                if len(rosters) == len(Role) and members != shown:
                    shown = members
                    yield members
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.wait(followers)

    def shared(self, name: str) -> ConsulText:
        """Return the value of the key `<prefix>/<name>`."""
        key = f"{self._config.consul_prefix}/{name}"
        return ConsulText(self._client, key, self._clock, self._rng, self._pace)

    async def _follow(
        self, role: Role, rosters: dict[Role, Roster], changed: asyncio.Event
    ) -> None:
        """Keep one role's roster up to date. Survives every failure; runs until cancelled."""
        roster = Roster(self._pace.grace)
        cursor = Cursor(self._pace)
        failures = 0
        while True:
            began = self._clock.now()
            try:
                await self._query(role, roster, cursor)
                failures = 0
                rosters[role] = roster
                changed.set()
                pause = cursor.pause(self._clock.now() - began)
            except UnavailableError as error:
                if failures == 0:
                    _log.warning("last known %s processes stand: %s", role, error)
                failures += 1
            except Exception:  # noqa: BLE001 - the top of a task that must not die
                _log.exception("last known %s processes stand", role)
                failures += 1
            if failures:
                cursor.restart()
                roster.interrupt()
                pause = backoff(failures, self._rng)
            await asyncio.sleep(pause)

    async def _query(self, role: Role, roster: Roster, cursor: Cursor) -> None:
        # While entries are kept on trust, somebody has to look when that ends.
        wait = self._pace.holding_wait if roster.is_holding else self._pace.wait
        service = f"{self._config.consul_prefix}-{role}"
        header, instances = await self._client.instances(service, cursor.index, wait)
        if not cursor.advance(header):
            roster.interrupt()
        now, beat_seconds = self._clock.now(), self._config.consul_ttl_seconds / BEATS_PER_TTL
        since = now - self._config.consul_ttl_seconds
        if any(each.troubled(beat_seconds, since) for each in self._registrations):
            roster.doubt(now)
        roster.observe(from_services(instances), now)
