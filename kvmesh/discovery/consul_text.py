"""A shared text in Consul's key-value store, followed by one blocking query."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator

from kvmesh.clock import Clock
from kvmesh.discovery.base import Stored
from kvmesh.discovery.consul_client import ConsulClient
from kvmesh.discovery.consul_index import Cursor, Pace, backoff
from kvmesh.errors import UnavailableError

log = logging.getLogger(__name__)

ABSENT = "0"
"""The version of a key that isn't there: Consul's check-and-set takes it for that."""


class ConsulText:
    """The value of one key."""

    def __init__(
        self, client: ConsulClient, key: str, clock: Clock, rng: random.Random, pace: Pace
    ) -> None:
        self._client = client
        self._key = key
        self._clock = clock
        self._rng = rng
        self._pace = pace

    @property
    def where(self) -> str:
        """The key, and whose."""
        return f"key {self._key} of Consul at {self._client.address}"

    async def watch(self) -> AsyncIterator[str | None]:
        """Follow the key, through every outage."""
        cursor = Cursor(self._pace)
        shown: tuple[str | None] | None = None
        failures = 0
        while True:
            began = self._clock.now()
            try:
                header, text, _ = await self._client.value(self._key, cursor.index, self._pace.wait)
            except UnavailableError as error:
                if failures == 0:
                    log.warning("what was read last of %s stands: %s", self._key, error)
                failures += 1
                cursor.restart()
                await asyncio.sleep(backoff(failures, self._rng))
                continue
            failures = 0
            cursor.advance(header)
            if shown != (text,):
                shown = (text,)
                yield text
            await asyncio.sleep(cursor.pause(self._clock.now() - began))

    async def read(self) -> Stored:
        """Return the value. Raises UnavailableError."""
        _, text, version = await self._client.value(self._key, 0, 0)
        return Stored(text, version)

    async def write(self, text: str | None, version: str) -> bool:
        """Set or delete the key. Raises UnavailableError."""
        if text is not None:
            return await self._client.set_value(self._key, text, version)
        if version == ABSENT:
            return (await self.read()).version == version
        return await self._client.delete_value(self._key, version)
