"""The vLLM engine when things break: real engine cores, real NIXL, the small model."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.engine.base import EngineRequest, Step
from kvmesh.engine.vllm import VllmEngine
from kvmesh.errors import EngineError, TicketError, TransferError
from kvmesh.testing.engine import started
from kvmesh.testing.engine_vllm import CONFIG, VllmRig, smollm2
from kvmesh.types import KvTicket, Role, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# Starts an engine, tells the pid of its core, and waits to be killed.
WORKER = """
import asyncio, multiprocessing, sys
from pathlib import Path
from kvmesh.testing.engine_vllm import VllmRig
from kvmesh.types import Role

async def main():
    engine = VllmRig(Path(sys.argv[1])).engine(Role.DECODE)
    await engine.start()
    print("core", multiprocessing.active_children()[0].pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model() -> Path:
    return await asyncio.to_thread(smollm2)


@pytest.fixture(scope="module")
def rig(model: Path) -> VllmRig:
    return VllmRig(model, replace(CONFIG, kv_lease_seconds=6))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(rig: VllmRig) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    async with AsyncExitStack() as stack:
        prefill, decode = rig.engine(Role.PREFILL), rig.engine(Role.DECODE)
        await stack.enter_async_context(started(prefill))
        await stack.enter_async_context(started(decode))
        yield prefill, decode


Engines = tuple[VllmEngine, VllmEngine]


def ask(rig: VllmRig, name: str, tokens: int = 70) -> EngineRequest:
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, rig.prompt(tokens, len(name)), sampling)


async def collect(steps: AsyncIterator[Step]) -> list[int]:
    return [token async for step in steps for token in step.token_ids]


async def ticket_of(engine: VllmEngine, request: EngineRequest) -> KvTicket:
    ticket = (await engine.prefill(request)).ticket
    assert ticket is not None
    return ticket


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail("it did not come to that")


async def test_an_expired_ticket_frees_and_is_refused(rig: VllmRig, engines: Engines) -> None:
    prefill, decode = engines
    request = ask(rig, "expires")
    ticket = await ticket_of(prefill, request)
    assert prefill.load().ticket_bytes == ticket.byte_count > 0
    await until(lambda: prefill.load().ticket_bytes == 0)
    assert prefill.load().used_blocks == 0
    late = replace(ticket, lease_expire_time=ticket.lease_expire_time + 3600)
    with pytest.raises(TicketError):
        await collect(decode.resume(request, late))
    assert not await prefill.release(ticket.ticket_id)


async def test_a_prefill_cancelled_when_it_has_just_ended_holds_nothing(
    rig: VllmRig, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _ = engines
    expired = prefill._gauge.expired_leases
    update, usage = prefill._gauge.update, []

    def cancel_at_the_end(scheduler: Any) -> None:
        update(scheduler)
        usage.append(scheduler.kv_cache_usage)
        if scheduler.num_running_reqs == 0 and scheduler.kv_cache_usage > 0:
            computing.cancel()  # vLLM has its answer ready, the caller has not seen it yet

    monkeypatch.setattr(prefill._gauge, "update", cancel_at_the_end)
    computing = asyncio.create_task(prefill.prefill(ask(rig, "cancelled")))
    with pytest.raises(asyncio.CancelledError):
        await computing
    assert max(usage) > 0
    await until(lambda: usage[-1] == 0)
    assert prefill._gauge.expired_leases == expired, "freed by time alone"


async def test_a_dead_engine_core_is_told_and_the_other_side_lives_on(
    rig: VllmRig, engines: Engines
) -> None:
    prefill, decode = engines
    pulled = ask(rig, "before")
    await collect(decode.resume(pulled, await ticket_of(prefill, pulled)))
    request = ask(rig, "orphaned-request")
    ticket = await ticket_of(prefill, request)
    (core,) = prefill._launcher._cores()
    assert core.pid is not None
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(TransferError):
        await collect(decode.resume(request, ticket))
    await until(lambda: prefill.load().total_blocks == 0)
    with pytest.raises(EngineError):
        prefill.check()
    with pytest.raises(EngineError):
        await collect(prefill.generate(request))
    assert prefill.load().ticket_bytes == 0
    assert len(await collect(decode.generate(request))) == 4
    decode.check()


async def test_closing_while_it_starts_leaves_no_core(rig: VllmRig) -> None:
    before = set(multiprocessing.active_children())
    engine = rig.engine(Role.DECODE)
    starting = asyncio.create_task(engine.start())
    await until(lambda: set(multiprocessing.active_children()) > before)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await engine.aclose()
    assert set(multiprocessing.active_children()) <= before
    with pytest.raises(EngineError):
        engine.check()


async def test_the_core_of_a_killed_worker_dies(model: Path) -> None:
    worker = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", WORKER, str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert worker.stdout is not None
    try:
        core = 0
        while not core:
            line = await asyncio.to_thread(worker.stdout.readline)
            assert line, "the worker ended early"
            core = int(line.split()[1]) if line.startswith("core ") else 0
        assert running(core)
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    await until(lambda: not running(core))


def running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
