"""The `nixl` transport between processes: peers that die, stand still and come back."""

import asyncio
import itertools
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvmesh.clock import SystemClock
from kvmesh.engine.base import EngineRequest, Step
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.engine import SimEngine
from kvmesh.engine.sim.latency import Latency
from kvmesh.engine.sim.model import expected
from kvmesh.errors import TicketError, TransferError
from kvmesh.kv import nixl_agent
from kvmesh.kv.base import KvTransport, PoolLayout, Pulled, StillWritingError
from kvmesh.kv.nixl import NixlTransport
from kvmesh.kv.nixl_messages import Region, Site, parse_offer
from kvmesh.kv.transports import open_host_pool
from kvmesh.testing.engine import sim_engine, started
from kvmesh.types import KvTicket, Sampling

SMALL = PoolLayout(total_blocks=64, block_bytes=4096)
LARGE = PoolLayout(total_blocks=64, block_bytes=2 << 20)
TIMEOUT = 60.0  # far more than anything here takes: what ends sooner has been noticed
SHORT = 0.3

HOLDER = """
import asyncio, json, os, signal, sys
from kvmesh.clock import SystemClock
from kvmesh.kv.base import PoolLayout
from kvmesh.kv.transports import open_host_pool

options = json.loads(sys.argv[1])
count = [0]

def pulled(ticket):
    print("pulled", ticket, flush=True)

async def main():
    layout = PoolLayout(options["blocks"], options["size"])
    pool = open_host_pool("nixl", layout, epoch=options["epoch"], clock=SystemClock(),
                          on_pulled=pulled)
    for block in range(layout.total_blocks):
        at = block * layout.block_bytes
        pool.memory[at : at + layout.block_bytes] = bytes([block + 1]) * layout.block_bytes
    while await asyncio.to_thread(sys.stdin.readline):
        count[0] += 1
        print("offer", pool.transport.offer(str(count[0])).hex(), flush=True)

asyncio.run(main())
"""

SIM_HOLDER = """
import asyncio, json, pickle, sys
from kvmesh.engine.base import EngineRequest
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.testing.engine import sim_engine, started
from kvmesh.types import Sampling

prompts = json.loads(sys.argv[1])

async def main():
    config = SimConfig(block_size=4, latency=Latency(speed=0.0), kv_transport="nixl")
    async with started(sim_engine(config)) as lent:
        for prompt in prompts:
            asked = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
            prefilled = await lent.engine.prefill(EngineRequest("r", prompt, asked))
            print("ticket", pickle.dumps(prefilled.ticket).hex(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        while lent.engine.load().ticket_blocks:
            await asyncio.sleep(0.001)
        print("free", lent.engine.load().used_blocks, flush=True)

asyncio.run(main())
"""


@dataclass
class Holder:
    process: asyncio.subprocess.Process

    async def offer(self) -> bytes:
        """Have it open a ticket."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return bytes.fromhex(await said(self.process, "offer"))


async def said(process: asyncio.subprocess.Process, word: str) -> str:
    """Return what a process says after `word`; others may write to its output too."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if line.startswith(word + " "):
            return line.removeprefix(word + " ").strip()
    raise AssertionError(f"the process ended before it said {word!r}")


@asynccontextmanager
async def running(script: str, argument: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        json.dumps(argument),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def holding(layout: PoolLayout = SMALL) -> AsyncIterator[Holder]:
    options = {
        "blocks": layout.total_blocks,
        "size": layout.block_bytes,
        "epoch": uuid.uuid4().hex,
    }
    async with running(HOLDER, options) as process:
        yield Holder(process)


class Puller:
    """This process's end, over memory that outlives its transport."""

    def __init__(self, layout: PoolLayout = SMALL) -> None:
        self.layout = layout
        self.memory = np.zeros(layout.size, np.uint8)
        self.closed = 0
        region = Region(layout, self.memory.ctypes.data)
        self.transport: KvTransport = NixlTransport(
            region, uuid.uuid4().hex, SystemClock(), lambda _: None, self._note
        )

    def _note(self) -> None:
        self.closed += 1

    async def pull(self, holder: Holder) -> Pulled:
        """Pull all blocks by a new ticket, last first."""
        return await self.pull_by(await holder.offer())

    async def pull_by(self, offer: bytes, timeout: float = TIMEOUT) -> Pulled:
        """Pull all blocks, last first."""
        blocks = range(self.layout.total_blocks)
        return await self.transport.pull(offer, blocks[::-1], blocks, timeout=timeout)

    async def pull_one(self, holder: Holder) -> Pulled:
        """Pull a block by a new ticket."""
        return await self.transport.pull(await holder.offer(), [0], [0], timeout=TIMEOUT)

    def has_all(self) -> bool:
        """Whether each block has what the holder filled the one at its mirror place with."""
        last = self.layout.total_blocks
        blocks = self.memory.reshape(last, self.layout.block_bytes)
        return bool((blocks == np.arange(last, 0, -1, dtype=np.uint8)[:, None]).all())


Open = Callable[..., Puller]


@pytest.fixture
async def open_puller() -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        def open_one(layout: PoolLayout = SMALL) -> Puller:
            puller = Puller(layout)
            stack.push_async_callback(puller.transport.aclose)
            return puller

        yield open_one


class TestTwoProcesses:
    async def test_pulls(self, open_puller: Open) -> None:
        puller = open_puller(LARGE)
        async with holding(LARGE) as holder:
            offer = await holder.offer()
            assert (await puller.pull_by(offer)).byte_count == LARGE.size
            assert puller.has_all()
            assert await said(holder.process, "pulled") == "1"
            with pytest.raises(TicketError):
                await puller.pull_by(offer)

    @pytest.mark.parametrize("tls", ["tcp,self", "posix,tcp,self"])
    async def test_pulls_without_reading_memory_across(
        self, open_puller: Open, monkeypatch: pytest.MonkeyPatch, tls: str
    ) -> None:
        monkeypatch.setenv("UCX_TLS", tls)
        puller = open_puller(LARGE)
        async with holding(LARGE) as holder:
            await puller.pull(holder)
            assert puller.has_all()

    async def test_many_holders_and_pulls_side_by_side(self, open_puller: Open) -> None:
        pullers = [open_puller(), open_puller()]
        async with holding() as one, holding() as two:
            pulls = [
                puller.pull_by(await holder.offer())
                for _ in range(50)
                for holder in (one, two)
                for puller in pullers
            ]
            await asyncio.gather(*pulls)
        assert all(puller.has_all() for puller in pullers)


class TestDeath:
    async def test_in_the_middle_of_a_pull(self, open_puller: Open) -> None:
        puller = open_puller(LARGE)
        async with holding(LARGE) as holder:
            await puller.pull_one(holder)
            offer = await holder.offer()
            pulling = asyncio.create_task(puller.pull_by(offer))
            await asyncio.sleep(0)
            holder.process.kill()
            async with asyncio.timeout(TIMEOUT / 2):
                with pytest.raises(TransferError):
                    await pulling
            puller.memory[:] = 0
            with pytest.raises(TransferError):
                await puller.pull_by(offer)
            assert not puller.memory.any()

    async def test_a_puller_costs_its_holder_nothing(self, open_puller: Open) -> None:
        puller = open_puller(LARGE)
        async with holding(LARGE) as holder:
            for _ in range(3):
                other = Puller(LARGE)
                pulling = asyncio.create_task(other.pull_by(await holder.offer()))
                await asyncio.sleep(0)
                await other.transport.aclose()
                with pytest.raises(TransferError):
                    await pulling
            await puller.pull(holder)
            assert puller.has_all()

    async def test_a_new_life_works_at_once(self, open_puller: Open) -> None:
        puller = open_puller()
        for _ in range(3):
            async with holding() as holder:
                await puller.pull(holder)
                offer = await holder.offer()
            async with asyncio.timeout(TIMEOUT / 2):
                with pytest.raises(TransferError):
                    await puller.pull_by(offer)
        assert peers(puller.transport) == 0


class TestStandstill:
    @pytest.mark.parametrize("tls", ["all", "tcp,self"])
    async def test_costs_the_timeout_and_only_its_own_pulls(
        self, open_puller: Open, monkeypatch: pytest.MonkeyPatch, tls: str
    ) -> None:
        monkeypatch.setenv("UCX_TLS", tls)
        puller = open_puller()
        async with holding() as still, holding() as other:
            await puller.pull(still)
            offers = [await still.offer() for _ in range(20)]
            still.process.send_signal(signal.SIGSTOP)
            stuck = [asyncio.create_task(puller.pull_by(offer, SHORT)) for offer in offers]
            for _ in range(20):
                await puller.pull(other)
            ends = await asyncio.gather(*stuck, return_exceptions=True)
            assert {type(end) for end in ends} <= {Pulled, TransferError, StillWritingError}
            still.process.send_signal(signal.SIGCONT)
            for end in ends:
                if isinstance(end, StillWritingError):
                    await end.settled
            await puller.pull(still)
            assert puller.has_all()

    async def test_over_tcp_keeps_the_blocks_until_it_is_over(
        self, open_puller: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        puller = open_puller(LARGE)
        async with holding(LARGE) as holder:
            offer = await holder.offer()
            error = await self.stick(puller, holder)
            assert not error.settled.done()
            async with asyncio.timeout(TIMEOUT / 2):
                with pytest.raises(TransferError, match="earlier pull"):
                    await puller.pull_by(offer)
            holder.process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(TIMEOUT):
                await error.settled
            puller.memory[:] = 0
            await puller.pull(holder)
            assert puller.has_all()

    async def test_over_tcp_ends_with_its_process(
        self, open_puller: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        puller = open_puller(LARGE)
        async with holding(LARGE) as holder:
            error = await self.stick(puller, holder)
            holder.process.kill()
            async with asyncio.timeout(TIMEOUT):
                await error.settled

    async def test_closing_ends_what_still_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        puller = Puller(LARGE)
        async with holding(LARGE) as holder:
            error = await self.stick(puller, holder)
            await puller.transport.aclose()
            assert error.settled.done()
            assert puller.closed == 1
            puller.memory[:] = 0
            holder.process.send_signal(signal.SIGCONT)
            other = Puller()
            async with holding() as fresh:
                await other.pull(fresh)  # something that takes a while
            await other.transport.aclose()
            assert not puller.memory.any()

    async def test_a_cancelled_pull_is_bounded_too(
        self, open_puller: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        puller = open_puller(LARGE)
        async with holding(LARGE) as holder:
            await puller.pull_one(holder)
            offer = await holder.offer()
            holder.process.send_signal(signal.SIGSTOP)
            pulling = asyncio.create_task(puller.pull_by(offer))
            await asyncio.sleep(SHORT)
            pulling.cancel()
            async with asyncio.timeout(TIMEOUT / 2):
                with pytest.raises(StillWritingError):
                    await pulling

    @staticmethod
    async def stick(puller: Puller, holder: Holder) -> StillWritingError:
        await puller.pull_one(holder)
        offer = await holder.offer()
        holder.process.send_signal(signal.SIGSTOP)
        with pytest.raises(StillWritingError) as caught:
            await puller.pull_by(offer, SHORT)
        return caught.value


class TestThrift:
    async def test_pulls_leave_nothing_behind(self, open_puller: Open) -> None:
        puller = open_puller()
        async with holding() as holder:
            for _ in range(50):
                await puller.pull(holder)
            before = usage()
            for _ in range(200):
                await puller.pull(holder)
            after = usage()
        assert after.files == before.files
        assert after.threads == before.threads
        assert after.memory - before.memory < 1 << 20
        assert peers(puller.transport) == 1

    async def test_transports_leave_nothing_behind(self) -> None:
        seen: list[Usage] = []
        async with holding() as holder:
            for turn in range(35):
                puller = Puller()
                await puller.pull(holder)
                await puller.transport.aclose()
                await puller.transport.aclose()
                assert puller.closed == 1
                if turn % 10 == 4:
                    seen.append(usage())
        assert seen[-1].files <= seen[0].files
        assert seen[-1].threads == seen[0].threads
        # What they kept would show each time; what else the process does with its memory, not.
        growth = [after.memory - before.memory for before, after in itertools.pairwise(seen)]
        assert min(growth) < 4 << 20

    async def test_idle_it_sleeps(self, open_puller: Open) -> None:
        puller = open_puller()
        async with holding() as holder:
            await puller.pull(holder)
            await asyncio.sleep(2.0)  # until it is idle
            spent = time.process_time()
            await asyncio.sleep(1.0)
            assert time.process_time() - spent < 0.05


class TestSimulatedEngine:
    async def test_prefill_and_decode_in_two_processes(self) -> None:
        config = SimConfig(block_size=4, latency=Latency(speed=0.0), kv_transport="nixl")
        rng = random.Random(5)
        prompts = [[rng.randrange(256, 9999) for _ in range(n)] for n in (1, 3, 4, 5, 64, 999)]
        async with running(SIM_HOLDER, prompts) as process, started(sim_engine(config)) as decode:
            engine = decode.engine
            assert isinstance(engine, SimEngine)
            for prompt in prompts:
                ticket = pickle.loads(bytes.fromhex(await said(process, "ticket")))
                assert isinstance(ticket, KvTicket)
                sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
                request = EngineRequest(f"r{len(prompt)}", prompt, sampling)
                tokens = await collect(engine.resume(request, ticket))
                assert tokens == expected(config.model("sim-model"), prompt, 8)[-len(tokens) :]
                assert len(tokens) >= 7
            assert engine.load().received_bytes > 999 * 8
            assert process.stdin is not None
            process.stdin.write(b"\n")
            assert await said(process, "free") == "0"

    async def test_blocks_still_written_to_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        config = SimConfig(
            block_size=4,
            latency=Latency(speed=0.0),
            kv_transport="nixl",
            pull_timeout_seconds=SHORT,
        )
        prompt = [random.Random(1).randrange(256, 9999) for _ in range(999)]
        async with running(SIM_HOLDER, [prompt]) as process, started(sim_engine(config)) as decode:
            engine = decode.engine
            assert isinstance(engine, SimEngine)
            ticket = pickle.loads(bytes.fromhex(await said(process, "ticket")))
            process.send_signal(signal.SIGSTOP)
            request = EngineRequest("r", prompt, Sampling(max_tokens=8, temperature=0.0))
            with pytest.raises(StillWritingError) as caught:
                await collect(engine.resume(request, ticket))
            assert engine.load().running == 0
            assert engine.load().used_blocks == 251  # the prompt's, and one for the answer
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(TIMEOUT):
                await caught.value.settled
            await asyncio.sleep(0)
            assert engine.load().used_blocks == 0


class TestWithoutNixl:
    async def test_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nixl_agent, "_MODULES", ("kvmesh_has_no_such._api",))
        with pytest.raises(TransferError, match=r"kvmesh\[nixl\]"):
            open_host_pool("nixl", SMALL, epoch="e", clock=SystemClock(), on_pulled=lambda _: None)


class TestMessages:
    def test_survive_the_way(self) -> None:
        region = Region(PoolLayout(9, 4096), 2**47, "VRAM", 3)
        site = Site("epoch", region, 2**46, b"\0metadata")
        assert parse_offer(site.offer(2**40)) == (site, 2**40)

    @pytest.mark.parametrize("kind", [2, 255])
    def test_pools_of_an_unknown_kind(self, kind: int) -> None:
        packed = bytearray(Site("e", Region(PoolLayout(9, 64), 0), 0, b"").offer(1))
        packed[5] = kind
        with pytest.raises(TicketError):
            parse_offer(bytes(packed))

    def test_pools_larger_than_any(self) -> None:
        packed = Site("e", Region(PoolLayout(2**31, 64), 0), 0, b"").offer(1)
        with pytest.raises(TicketError):
            parse_offer(packed)


async def collect(steps: AsyncGenerator[Step, None]) -> list[int]:
    async with aclosing(steps):
        return [token async for step in steps for token in step.token_ids]


@dataclass
class Usage:
    files: int
    threads: int
    memory: int


def usage() -> Usage:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return Usage(
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        pages * os.sysconf("SC_PAGESIZE"),
    )


def peers(transport: KvTransport) -> int:
    return len(transport._thread._peers)  # type: ignore[attr-defined]
