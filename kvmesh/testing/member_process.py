"""A process that is a registered member and nothing else, to be killed by tests.

async with MemberProcess(config, member) as process:
    await process.set_state(State.READY)
    await process.kill()
"""

import asyncio
import json
import random
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Self

from kvmesh.clock import SystemClock
from kvmesh.discovery.config import DiscoveryConfig, DiscoveryKind
from kvmesh.discovery.entry import Entry, from_text, to_text
from kvmesh.discovery.factory import create
from kvmesh.types import Member, State

REPLY_SECONDS = 30.0


class MemberProcess:
    """An async context manager: enters once the member is registered, leaves by killing."""

    def __init__(self, config: DiscoveryConfig, member: Member) -> None:
        self._arguments = json.dumps([asdict(config), to_text(Entry(member, 0))])
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._reply("registered")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()

    async def set_state(self, state: State) -> None:
        """Let the process publish a state."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(f"{state}\n".encode())
        await process.stdin.drain()
        await self._reply(state)

    async def leave(self) -> None:
        """Let the process withdraw and exit."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(REPLY_SECONDS):
            await process.wait()

    async def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        process = self._running()
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(REPLY_SECONDS):
            await process.wait()

    async def _reply(self, expected: str) -> None:
        process = self._running()
        assert process.stdout is not None
        async with asyncio.timeout(REPLY_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
        if line != expected:
            raise RuntimeError(f"the member process said {line!r} instead of {expected!r}")

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the member process is not started")
        return self._process


async def _main(arguments: str) -> None:
    settings, text = json.loads(arguments)
    settings["kind"] = DiscoveryKind(settings["kind"])
    settings["static_members"] = tuple(settings["static_members"])
    config = DiscoveryConfig(**settings)
    member = from_text(text).member
    async with (
        create(config, SystemClock(), random.Random(member.epoch)) as discovery,
        discovery.register(member) as registration,
    ):
        _say("registered")
        while line := await asyncio.to_thread(sys.stdin.readline):
            state = State(line.strip())
            await registration.set_state(state)
            _say(state)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
