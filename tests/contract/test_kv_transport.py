"""One suite for every KV transport, and what a transport owes when its peer misbehaves."""

import asyncio
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import InvalidRequestError, TicketError, TransferError
from kvmesh.kv.base import KvTransport, PoolLayout
from kvmesh.kv.board import SLOTS
from kvmesh.kv.notices import NoticeDesk
from kvmesh.kv.transports import BACKENDS, open_host_pool

LAYOUT = PoolLayout(total_blocks=64, block_bytes=32)
LARGE = PoolLayout(total_blocks=64, block_bytes=1 << 20)
TIMEOUT = 20.0


@dataclass
class End:
    """One process's end: its pool, and the tickets that it was told were pulled."""

    memory: memoryview
    transport: KvTransport
    pulled: list[str] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, ticket_id: str) -> None:
        self.pulled.append(ticket_id)
        self.heard.set()

    async def has_heard(self, *tickets: str) -> None:
        """Wait until it was told of these, and of no others."""
        async with asyncio.timeout(TIMEOUT):
            while len(self.pulled) < len(tickets):
                self.heard.clear()
                await self.heard.wait()
        assert sorted(self.pulled) == sorted(tickets)

    def block(self, number: int, layout: PoolLayout = LAYOUT) -> bytes:
        size = layout.block_bytes
        return bytes(self.memory[number * size : (number + 1) * size])

    def fill(self, layout: PoolLayout = LAYOUT) -> None:
        size = layout.block_bytes
        for number in range(layout.total_blocks):
            self.memory[number * size : (number + 1) * size] = bytes([number + 1]) * size


Opener = Callable[..., End]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def open_end(backend: str) -> AsyncIterator[Opener]:
    async with AsyncExitStack() as stack:

        def open_one(layout: PoolLayout = LAYOUT, epoch: str = "") -> End:
            told: list[End] = []

            def on_pulled(ticket_id: str) -> None:
                told[0].hear(ticket_id)

            pool = open_host_pool(
                backend,
                layout,
                epoch=epoch or uuid.uuid4().hex,
                clock=SystemClock(),
                on_pulled=on_pulled,
            )
            stack.push_async_callback(pool.transport.aclose)
            told.append(End(pool.memory, pool.transport))
            return told[0]

        yield open_one


async def pull(into: End, offer: bytes, remote: list[int], local: list[int]) -> int:
    pulled = await into.transport.pull(offer, remote, local, timeout=TIMEOUT)
    assert pulled.seconds >= 0
    return pulled.byte_count


async def test_copies_blocks_one_to_one(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    holder.fill()
    remote, local = [3, 4, 5, 60, 1, 0], [9, 8, 7, 0, 1, 63]
    assert await pull(puller, holder.transport.offer("t"), remote, local) == 6 * 32
    for theirs, ours in zip(remote, local, strict=True):
        assert puller.block(ours) == holder.block(theirs)
    untouched = set(range(LAYOUT.total_blocks)) - set(local)
    assert {puller.block(number) for number in untouched} == {bytes(32)}
    await holder.has_heard("t")


async def test_pulls_into_itself(open_end: Opener) -> None:
    end = open_end()
    end.fill()
    await pull(end, end.transport.offer("t"), [3], [5])
    assert end.block(5) == end.block(3) == bytes([4]) * 32
    await end.has_heard("t")


async def test_no_blocks_use_the_ticket_up_too(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    offer = holder.transport.offer("t")
    assert await pull(puller, offer, [], []) == 0
    with pytest.raises(TicketError):
        await pull(puller, offer, [], [])
    await holder.has_heard("t")


async def test_large_pulls_leave_the_loop_alone(open_end: Opener) -> None:
    holder, puller = open_end(LARGE), open_end(LARGE)
    holder.fill(LARGE)
    blocks = list(range(LARGE.total_blocks))
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await pull(puller, holder.transport.offer("t"), blocks, blocks[::-1])
    turning.cancel()
    assert turns > 10
    assert all(puller.block(63 - number, LARGE) == holder.block(number, LARGE) for number in blocks)


async def test_a_cancelled_pull_writes_no_more(open_end: Opener) -> None:
    holder, puller = open_end(LARGE), open_end(LARGE)
    holder.fill(LARGE)
    blocks = list(range(LARGE.total_blocks))
    pulling = asyncio.create_task(pull(puller, holder.transport.offer("t"), blocks, blocks))
    await asyncio.sleep(0)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    puller.memory[:] = bytes(LARGE.size)
    await asyncio.sleep(0.02)
    assert puller.memory == bytes(LARGE.size)


async def test_many_side_by_side(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    holder.fill()
    tickets = [str(number) for number in range(64)]
    offers = [holder.transport.offer(ticket) for ticket in tickets]
    await asyncio.gather(*(pull(puller, offers[n], [n], [63 - n]) for n in range(64)))
    assert all(puller.block(63 - number) == holder.block(number) for number in range(64))
    await holder.has_heard(*tickets)


async def test_a_used_ticket_is_refused(open_end: Opener) -> None:
    holder, one, two = open_end(), open_end(), open_end()
    offer = holder.transport.offer("t")
    await pull(one, offer, [1], [1])
    for _ in range(2):
        with pytest.raises(TicketError):
            await pull(two, offer, [1], [1])
    await holder.has_heard("t")


async def test_a_withdrawn_ticket_is_refused(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    gone, kept = holder.transport.offer("gone"), holder.transport.offer("kept")
    holder.transport.withdraw("gone")
    holder.transport.withdraw("gone")
    holder.transport.withdraw("never was")
    with pytest.raises(TicketError):
        await pull(puller, gone, [1], [1])
    await pull(puller, kept, [1], [1])
    await holder.has_heard("kept")


async def test_blocks_that_are_used_again_meanwhile_are_no_pull(open_end: Opener) -> None:
    holder, puller = open_end(LARGE), open_end(LARGE)
    holder.fill(LARGE)
    blocks = list(range(LARGE.total_blocks))
    pulling = asyncio.create_task(pull(puller, holder.transport.offer("t"), blocks, blocks))
    await asyncio.sleep(0)  # it reads
    holder.transport.withdraw("t")
    holder.memory[:] = bytes(LARGE.size)
    with pytest.raises(TicketError):
        await pulling
    assert not holder.pulled


async def test_blocks_that_are_still_computed_are_waited_for(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    offer = holder.transport.offer("t", whole=False)
    with pytest.raises(TicketError):
        await pull(puller, offer, [3], [5])
    waiting = asyncio.create_task(puller.transport.whole(offer, timeout=TIMEOUT))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    holder.fill()
    holder.transport.fulfil("t")
    await waiting
    await puller.transport.whole(offer, timeout=TIMEOUT)  # it uses nothing up
    await pull(puller, offer, [3], [5])
    assert puller.block(5) == bytes([4]) * 32
    await holder.has_heard("t")


async def test_many_wait_side_by_side(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    offers = [holder.transport.offer(f"t{n}", whole=False) for n in range(50)]
    async with asyncio.TaskGroup() as group:
        waiting = [
            group.create_task(puller.transport.whole(each, timeout=TIMEOUT)) for each in offers
        ]
        for n in range(50):
            holder.transport.fulfil(f"t{n}")
    assert all(each.done() for each in waiting)
    assert holder.pulled == []


@pytest.mark.parametrize("fulfilled", [False, True])
async def test_whoever_waits_hears_of_a_withdrawal(open_end: Opener, fulfilled: bool) -> None:
    holder, puller = open_end(), open_end()
    offer = holder.transport.offer("t", whole=False)
    waiting = asyncio.create_task(puller.transport.whole(offer, timeout=TIMEOUT))
    await asyncio.sleep(0)
    holder.transport.withdraw("t")
    if fulfilled:
        holder.transport.fulfil("t")
    with pytest.raises(TicketError):
        await waiting


async def test_waiting_has_an_end(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    offer = holder.transport.offer("t", whole=False)
    with pytest.raises(TransferError, match=r"not computed within 0\.01 s"):
        await puller.transport.whole(offer, timeout=0.01)
    waiting = asyncio.create_task(puller.transport.whole(offer, timeout=TIMEOUT))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    waiting = asyncio.create_task(puller.transport.whole(offer, timeout=TIMEOUT))
    await asyncio.sleep(0)
    await puller.transport.aclose()
    with pytest.raises(TransferError):
        await waiting


async def test_a_used_ticket_is_not_waited_for(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    offer = holder.transport.offer("t")
    await puller.transport.whole(offer, timeout=TIMEOUT)
    await pull(puller, offer, [3], [5])
    with pytest.raises(TicketError):
        await puller.transport.whole(offer, timeout=TIMEOUT)


async def test_a_ticket_is_opened_once(open_end: Opener) -> None:
    holder = open_end()
    holder.transport.offer("t")
    with pytest.raises(ValueError, match="open already"):
        holder.transport.offer("t")


async def test_the_oldest_of_too_many_tickets_is_closed(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    oldest, second = holder.transport.offer("oldest"), holder.transport.offer("second")
    for number in range(SLOTS - 1):
        latest = holder.transport.offer(str(number))
    with pytest.raises(TicketError):
        await pull(puller, oldest, [1], [1])
    await pull(puller, second, [1], [1])
    await pull(puller, latest, [1], [1])


async def test_blocks_that_do_not_exist(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    offer = holder.transport.offer("t")
    for wrong in (64, -1):
        with pytest.raises(TicketError):
            await pull(puller, offer, [wrong], [1])
    with pytest.raises(ValueError, match="remote blocks"):
        await pull(puller, offer, [1, 2], [1])
    await pull(puller, offer, [1], [1])  # it is open still


async def test_other_block_sizes_are_refused(open_end: Opener) -> None:
    holder, puller = open_end(LARGE), open_end()
    with pytest.raises(TicketError):
        await pull(puller, holder.transport.offer("t"), [1], [1])


@pytest.mark.parametrize("peer", [b"", b"\xff", b"{}", b"[]", b'{"pid": "x"}'])
async def test_nonsense_for_a_peer(open_end: Opener, peer: bytes) -> None:
    with pytest.raises(TicketError):
        await pull(open_end(), peer, [1], [1])


async def test_closed_ends(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    peer = holder.transport.offer("t")
    await holder.transport.aclose()
    await holder.transport.aclose()
    holder.transport.withdraw("t")
    with pytest.raises(TransferError):
        holder.transport.offer("late")
    with pytest.raises((TransferError, TicketError)):
        await pull(puller, peer, [1], [1])
    await puller.transport.aclose()
    with pytest.raises(TransferError):
        await pull(puller, peer, [1], [1])


async def test_an_unknown_backend_names_the_known() -> None:
    with pytest.raises(InvalidRequestError, match="local"):
        open_host_pool(
            "carrier-pigeon", LAYOUT, epoch="e", clock=SystemClock(), on_pulled=lambda _: None
        )


class TestLocalPeers:
    """The `local` transport with its holder in another process."""

    @pytest.fixture
    def backend(self) -> str:
        return "local"

    async def test_one_epoch_is_one_life(self, open_end: Opener) -> None:
        epoch = uuid.uuid4().hex
        open_end(epoch=epoch)
        with pytest.raises(TransferError):
            open_end(epoch=epoch)

    HOLDER = """
import asyncio, sys
from kvmesh.clock import SystemClock
from kvmesh.kv.base import PoolLayout
from kvmesh.kv.transports import open_host_pool

async def main():
    pulled = []
    pool = open_host_pool("local", PoolLayout(64, 32), epoch=sys.argv[1], clock=SystemClock(),
                          on_pulled=lambda ticket: (pulled.append(ticket),
                                                    print(len(pulled), flush=True)))
    pool.memory[:] = bytes([7]) * len(pool.memory)
    for number in range(int(sys.argv[2])):
        print(pool.transport.offer(str(number)).decode(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

    @asynccontextmanager
    async def holder(
        self, tickets: int = 1
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[bytes]]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            self.HOLDER,
            uuid.uuid4().hex,
            str(tickets),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            yield process, [(await process.stdout.readline()).strip() for _ in range(tickets)]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def test_pulls_from_another_process(self, open_end: Opener) -> None:
        puller = open_end()
        async with self.holder() as (process, (offer,)):
            assert await pull(puller, offer, [1, 2], [3, 4]) == 64
            assert puller.block(3) == puller.block(4) == bytes([7]) * 32
            with pytest.raises(TicketError):
                await pull(puller, offer, [1], [5])
            assert process.stdout is not None
            assert await process.stdout.readline() == b"1\n"

    async def test_a_killed_holder_leaves_nothing(self, open_end: Opener) -> None:
        puller = open_end()
        async with self.holder() as (process, (offer,)):
            process.kill()
            await process.wait()
            with pytest.raises(TransferError):
                await pull(puller, offer, [1], [1])

    async def test_a_stopped_holder_is_not_waited_for(self, open_end: Opener) -> None:
        puller = open_end()
        async with self.holder(tickets=40) as (process, offers):  # more than its socket takes
            process.send_signal(signal.SIGSTOP)
            for number, offer in enumerate(offers):
                assert await pull(puller, offer, [1], [number]) == 32
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            async with asyncio.timeout(TIMEOUT):
                while await process.stdout.readline() != b"40\n":
                    pass

    async def test_a_recycled_descriptor_is_not_trusted(self, open_end: Opener) -> None:
        holder, puller = open_end(), open_end()
        theirs = holder.transport.offer("t")
        epoch = uuid.uuid4().hex.encode()
        ours = puller.transport.offer("t")
        # The same process and descriptor, as another life would find them.
        for fake in (self.with_epoch(theirs, epoch), self.with_epoch(ours, epoch)):
            with pytest.raises(TicketError, match="earlier life"):
                await pull(puller, fake, [1], [1])

    @pytest.mark.parametrize("kind", ["pipe", "file"])
    async def test_other_things_behind_the_descriptor(self, open_end: Opener, kind: str) -> None:
        puller = open_end()
        reading, writing = os.pipe()
        plain = os.memfd_create("something")
        try:
            fake = self.with_fd(puller.transport.offer("t"), reading if kind == "pipe" else plain)
            with pytest.raises(TicketError, match="earlier life"):
                await pull(puller, fake, [1], [1])
        finally:
            for each in (reading, writing, plain):
                os.close(each)

    @staticmethod
    def with_epoch(peer: bytes, epoch: bytes) -> bytes:
        before, rest = peer.split(b'"epoch": "')
        return before + b'"epoch": "' + epoch + rest[rest.index(b'"') :]

    @staticmethod
    def with_fd(peer: bytes, fd: int) -> bytes:
        before, rest = peer.split(b'"fd": ')
        return before + b'"fd": ' + str(fd).encode() + rest[rest.index(b",") :]


class TestNotices:
    """What the `local` transport's holders are told by."""

    async def test_more_than_a_datagram(self) -> None:
        epoch, heard, all_heard = uuid.uuid4().hex, list[int](), asyncio.Event()

        def hear(number: int) -> None:
            heard.append(number)
            if len(heard) == 10000:
                all_heard.set()

        holder = NoticeDesk(epoch, hear)
        puller = NoticeDesk(uuid.uuid4().hex, lambda _: None)
        for number in range(10000):
            puller.tell(epoch, number)
        async with asyncio.timeout(TIMEOUT):
            await all_heard.wait()
        assert heard == list(range(10000))
        holder.close()
        puller.close()

    async def test_nobody_there_costs_nothing(self) -> None:
        epoch, heard = uuid.uuid4().hex, asyncio.Queue[int]()
        holder = NoticeDesk(epoch, heard.put_nowait)
        puller = NoticeDesk(uuid.uuid4().hex, lambda _: None)
        puller.tell(uuid.uuid4().hex, 1)
        puller.tell(epoch, 2)
        async with asyncio.timeout(TIMEOUT):
            assert await heard.get() == 2
        holder.close()
        puller.close()

    async def test_closing_sends_what_is_queued(self) -> None:
        epoch, heard = uuid.uuid4().hex, asyncio.Queue[int]()
        holder = NoticeDesk(epoch, heard.put_nowait)
        puller = NoticeDesk(uuid.uuid4().hex, lambda _: None)
        puller.tell(epoch, 3)
        puller.close()
        puller.close()
        async with asyncio.timeout(TIMEOUT):
            assert await heard.get() == 3
        holder.close()

    @pytest.mark.parametrize("noise", [b"", b"?", b"x" * 9])
    async def test_noise_is_ignored(self, noise: bytes) -> None:
        epoch, heard = uuid.uuid4().hex, asyncio.Queue[int]()
        holder = NoticeDesk(epoch, heard.put_nowait)
        puller = NoticeDesk(uuid.uuid4().hex, lambda _: None)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(noise, b"\0kvmesh-kv-" + epoch.encode())
        puller.tell(epoch, 4)
        async with asyncio.timeout(TIMEOUT):
            assert await heard.get() == 4
        holder.close()
        puller.close()
