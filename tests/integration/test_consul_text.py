"""A shared text in a real Consul that dies, forgets and refuses."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import SharedText
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.consul import ConsulDiscovery
from kvmesh.errors import UnavailableError
from kvmesh.testing.consul import ConsulAgent

ACL_TOKEN = "7f3d6a4e-0d4c-4a58-9c3d-0a4f3d1c9a11"


@asynccontextmanager
async def opened(address: str, token: str = "") -> AsyncIterator[SharedText]:
    config = DiscoveryConfig(kind=DiscoveryKind.CONSUL, consul_address=address, consul_token=token)
    async with ConsulDiscovery(config, SystemClock(), random.Random(1)) as discovery:
        yield discovery.shared("routing")


async def put(text: SharedText, content: str) -> None:
    assert await text.write(content, (await text.read()).version)


async def test_the_last_text_stands_through_an_outage_and_changes_are_seen_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noticed = asyncio.Event()

    def note(_: logging.LogRecord) -> bool:
        noticed.set()
        return True

    caplog.handler.addFilter(note)
    caplog.set_level(logging.WARNING)
    async with (
        asyncio.timeout(120),
        ConsulAgent() as agent,
        opened(agent.address) as text,
        aclosing(text.watch()) as watch,  # type: ignore[type-var]
    ):
        await put(text, "one")
        assert await anext(watch) == "one"
        change = asyncio.ensure_future(anext(watch))
        await agent.kill()
        with pytest.raises(UnavailableError):
            await text.read()
        with pytest.raises(UnavailableError):
            await text.write("lost", "0")
        await noticed.wait()
        assert not change.done()

        await agent.start()
        await put(text, "two")
        seen = await change
        # An agent that has forgotten all may be asked before the new text is in it.
        if seen is None:
            seen = await anext(watch)
        assert seen == "two"
    warnings = [each for each in caplog.records if "stands" in each.getMessage()]
    assert len(warnings) == 1


async def test_an_acl_token_opens_what_is_denied_without() -> None:
    tokens = {"master": ACL_TOKEN, "agent": ACL_TOKEN}
    acl = {"enabled": True, "default_policy": "deny", "tokens": tokens}
    async with (
        asyncio.timeout(120),
        ConsulAgent({"acl": acl}, token=ACL_TOKEN) as agent,
        opened(agent.address, ACL_TOKEN) as text,
        opened(agent.address) as stranger,
    ):
        await put(text, "one")
        assert (await text.read()).text == "one"
        for denied in (stranger.read(), stranger.write("two", "0"), stranger.write(None, "7")):
            with pytest.raises(UnavailableError, match="Permission denied"):
                await denied
        assert (await text.read()).text == "one"
