"""`kvmesh router config` against a directory, a file and a real Consul."""

import asyncio
import random
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.config import environment
from kvmesh.discovery import (
    ROUTING_SETTINGS,
    DiscoveryConfig,
    DiscoveryKind,
    FileText,
    SharedText,
    create,
)
from kvmesh.testing.cluster import KVMESH
from kvmesh.testing.consul import ConsulAgent


class Config:
    """The command, and what it writes to."""

    def __init__(self, text: SharedText, options: list[str]) -> None:
        self.text = text
        self._options = options

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(KVMESH, "router", "config", *self._options, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
        )
        async with asyncio.timeout(120):
            out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    async def stored(self) -> dict[str, Any] | None:
        text = (await self.text.read()).text
        return None if text is None else tomllib.loads(text)


@pytest.fixture(params=["local", "file", "consul"])
async def config(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Config]:
    state = ["--state-dir", str(tmp_path / "state")]
    async with AsyncExitStack() as stack:
        if request.param == "file":
            path = tmp_path / "settings.toml"
            yield Config(FileText(path), [*state, "--file", str(path)])
            return
        if request.param == "local":
            discovery = DiscoveryConfig(directory=str(tmp_path / "state" / "members"))
            options = state
        else:
            agent = await stack.enter_async_context(ConsulAgent())
            discovery = DiscoveryConfig(kind=DiscoveryKind.CONSUL, consul_address=agent.address)
            options = [*state, "--discovery", "consul", "--consul-addr", agent.address]
        registry = await stack.enter_async_context(
            create(discovery, SystemClock(), random.Random(1))
        )
        yield Config(registry.shared(ROUTING_SETTINGS), options)


async def test_settings_are_written_shown_refused_and_taken_back(config: Config) -> None:
    code, out, err = await config.run()
    assert (code, out) == (0, "")
    assert "Nothing is changed" in err

    code, out, _ = await config.run(
        *("--set", "routing.policy_by_model=a b=session,c=random"),
        *("--set", "queue.max_requests=7", "--show"),
    )
    wanted: dict[str, Any] = {
        "routing": {"policy_by_model": ["a b=session", "c=random"]},
        "queue": {"max_requests": 7},
    }
    assert code == 0
    assert tomllib.loads(out) == wanted
    assert await config.stored() == wanted

    for wrong, told in (
        (["--set", "routing.policy=x"], "routing.policy: 'x' is not one of"),
        (["--set", "queue.max_requests=-1"], "queue.max_requests: '-1' is less than 0"),
        (["--set", "rpc.port=1"], "rpc.port: unknown key"),
        (["--set", "policy"], "section.field=value"),
        (["--unset", "routing.policy"], "routing.policy: is not set"),
        (["--clear", "--unset", "queue"], "--clear goes alone"),
    ):
        code, out, err = await config.run(*wrong)
        assert (code, out) == (1, "")
        assert told in err
        assert "Traceback" not in err
    assert await config.stored() == wanted

    code, out, _ = await config.run("--unset", "routing", "--set", "queue.max_requests=8")
    assert (code, out) == (0, "")
    assert await config.stored() == {"queue": {"max_requests": 8}}
    assert (await config.run("--unset", "queue.max_requests"))[0] == 0
    assert await config.stored() is None


async def test_what_is_wrong_already_is_cleared_by_one_command(config: Config) -> None:
    assert await config.text.write("[queue", (await config.text.read()).version)

    code, _, err = await config.run("--set", "queue.max_requests=8")
    assert code == 1
    assert "not valid TOML" in err
    assert (await config.run("--show"))[1] == "[queue\n"
    assert (await config.run("--clear"))[0] == 0
    assert await config.stored() is None


async def test_two_who_change_at_once_both_have_their_way(config: Config) -> None:
    done = await asyncio.gather(
        config.run("--set", "queue.max_requests=7"),
        config.run("--set", "queue.shed_margin=3"),
    )

    assert [code for code, _, _ in done] == [0, 0]
    assert await config.stored() == {"queue": {"max_requests": 7, "shed_margin": 3.0}}
