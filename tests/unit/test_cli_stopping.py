"""The order in which a cluster is stopped, and its bound."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvmesh.cli import stopping
from kvmesh.cli.procs import Running, start_ticks
from kvmesh.cli.stopping import kill, stop
from kvmesh.clock import SystemClock
from kvmesh.types import Role

Spawn = Callable[[Role, str], Running]

POLITE = "import signal, sys; signal.signal(15, lambda *_: sys.exit()); print('up', flush=True);\n"
POLITE += "while True: signal.pause()"
DEAF = POLITE.replace("lambda *_: sys.exit()", "signal.SIG_IGN")


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with ExitStack() as stack:

        def start(role: Role, code: str) -> Running:
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            started = start_ticks(process.pid)
            assert started is not None
            return Running(f"{role}-1", role, process.pid, started, Path("/nowhere.log"))

        yield start


async def test_clients_end_first_and_engines_last(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [spawn(role, POLITE) for role in Role]
    asked: list[set[Role]] = []
    alive_at: list[int] = []
    wait = stopping._wait

    async def recorded(group: list[Running], seconds: float, clock: SystemClock) -> list[Running]:
        if group:
            asked.append({process.role for process in group})
        left = await wait(group, seconds, clock)
        alive_at.append(sum(process.is_alive() for process in processes))
        return left

    monkeypatch.setattr(stopping, "_wait", recorded)
    told: list[str] = []
    await stop(processes, 30.0, SystemClock(), told.append)
    assert asked == [
        {Role.FRONTEND},
        {Role.TOKENIZER, Role.ROUTER},
        {Role.PREFILL, Role.DECODE},
    ]
    assert [alive_at[0], alive_at[2], alive_at[4]] == [4, 2, 0]
    assert told == []


async def test_who_does_not_stop_in_time_is_killed_and_named(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "CLOSE_SECONDS", 0.2)
    deaf, polite = spawn(Role.FRONTEND, DEAF), spawn(Role.DECODE, POLITE)
    told: list[str] = []
    await stop([deaf, polite], 0.0, SystemClock(), told.append)
    assert told == [f"frontend-1 (pid {deaf.pid}) did not stop in time: killed"]
    assert not deaf.is_alive()
    assert not polite.is_alive()


async def test_killing_takes_what_a_process_has_started_along(spawn: Spawn, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent = (
        "import pathlib, subprocess, sys, signal;"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid));"
        "print('up', flush=True); signal.pause()"
    )
    process = spawn(Role.PREFILL, parent)
    child = int(await asyncio.to_thread(note.read_text))
    assert start_ticks(child) is not None
    await kill([process], SystemClock())
    async with asyncio.timeout(10):
        while start_ticks(child) is not None:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)
