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
from kvmesh.kv.consent import ConsentDesk
from kvmesh.kv.transports import BACKENDS, open_host_pool

LAYOUT = PoolLayout(total_blocks=64, block_bytes=32)
LARGE = PoolLayout(total_blocks=64, block_bytes=1 << 20)
TIMEOUT = 20.0


@dataclass
class End:
    """One process's end: its pool, and the tickets it holds."""

    memory: memoryview
    transport: KvTransport
    tickets: set[str]
    asked: list[str] = field(default_factory=list)

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
            tickets: set[str] = set()
            asked: list[str] = []

            def on_pulled(ticket_id: str) -> bool:
                asked.append(ticket_id)
                held = ticket_id in tickets
                tickets.discard(ticket_id)
                return held

            pool = open_host_pool(
                backend,
                layout,
                epoch=epoch or uuid.uuid4().hex,
                clock=SystemClock(),
                on_pulled=on_pulled,
            )
            stack.push_async_callback(pool.transport.aclose)
            return End(pool.memory, pool.transport, tickets, asked)

        yield open_one


async def pull(
    into: End, source: bytes, remote: list[int], local: list[int], ticket: str = "t"
) -> int:
    pulled = await into.transport.pull(source, remote, local, ticket_id=ticket, timeout=TIMEOUT)
    assert pulled.seconds >= 0
    return pulled.byte_count


async def test_copies_blocks_one_to_one(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    holder.fill()
    holder.tickets.add("t")
    remote, local = [3, 4, 5, 60, 1, 0], [9, 8, 7, 0, 1, 63]
    assert await pull(puller, holder.transport.describe(), remote, local) == 6 * 32
    for theirs, ours in zip(remote, local, strict=True):
        assert puller.block(ours) == holder.block(theirs)
    untouched = set(range(LAYOUT.total_blocks)) - set(local)
    assert {puller.block(number) for number in untouched} == {bytes(32)}
    assert holder.asked == ["t"]


async def test_pulls_into_itself(open_end: Opener) -> None:
    end = open_end()
    end.fill()
    end.tickets.add("t")
    await pull(end, end.transport.describe(), [3], [5])
    assert end.block(5) == end.block(3) == bytes([4]) * 32


async def test_no_blocks_end_the_ticket_too(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    holder.tickets.add("t")
    assert await pull(puller, holder.transport.describe(), [], []) == 0
    assert not holder.tickets


async def test_large_pulls_leave_the_loop_alone(open_end: Opener) -> None:
    holder, puller = open_end(LARGE), open_end(LARGE)
    holder.fill(LARGE)
    holder.tickets.add("t")
    blocks = list(range(LARGE.total_blocks))
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await pull(puller, holder.transport.describe(), blocks, blocks[::-1])
    turning.cancel()
    assert turns > 10
    assert all(puller.block(63 - number, LARGE) == holder.block(number, LARGE) for number in blocks)


async def test_a_cancelled_pull_writes_no_more(open_end: Opener) -> None:
    holder, puller = open_end(LARGE), open_end(LARGE)
    holder.fill(LARGE)
    blocks = list(range(LARGE.total_blocks))
    pulling = asyncio.create_task(pull(puller, holder.transport.describe(), blocks, blocks))
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
    holder.tickets |= {str(number) for number in range(64)}
    peer = holder.transport.describe()
    await asyncio.gather(*(pull(puller, peer, [n], [63 - n], str(n)) for n in range(64)))
    assert not holder.tickets
    assert all(puller.block(63 - number) == holder.block(number) for number in range(64))


async def test_a_ticket_is_good_for_one_of_two(open_end: Opener) -> None:
    holder, one, two = open_end(), open_end(), open_end()
    holder.tickets.add("t")
    peer = holder.transport.describe()
    ends = await asyncio.gather(
        pull(one, peer, [1], [1]), pull(two, peer, [1], [1]), return_exceptions=True
    )
    assert {type(end) for end in ends} == {int, TicketError}


async def test_unknown_tickets_are_refused(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    with pytest.raises(TicketError):
        await pull(puller, holder.transport.describe(), [1], [1], "never-was")


async def test_blocks_that_do_not_exist(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    holder.tickets.add("t")
    for wrong in (64, -1):
        with pytest.raises(TicketError):
            await pull(puller, holder.transport.describe(), [wrong], [1])
    with pytest.raises(ValueError, match="remote blocks"):
        await pull(puller, holder.transport.describe(), [1, 2], [1])
    assert holder.tickets == {"t"}


async def test_other_block_sizes_are_refused(open_end: Opener) -> None:
    holder, puller = open_end(LARGE), open_end()
    with pytest.raises(TicketError):
        await pull(puller, holder.transport.describe(), [1], [1])


@pytest.mark.parametrize("peer", [b"", b"\xff", b"{}", b"[]", b'{"pid": "x"}'])
async def test_nonsense_for_a_peer(open_end: Opener, peer: bytes) -> None:
    with pytest.raises(TicketError):
        await pull(open_end(), peer, [1], [1])


async def test_closed_ends(open_end: Opener) -> None:
    holder, puller = open_end(), open_end()
    peer = holder.transport.describe()
    await holder.transport.aclose()
    await holder.transport.aclose()
    with pytest.raises((TransferError, TicketError)):
        await pull(puller, peer, [1], [1])
    await puller.transport.aclose()
    with pytest.raises(TransferError):
        await pull(puller, peer, [1], [1])


async def test_an_unknown_backend_names_the_known() -> None:
    with pytest.raises(InvalidRequestError, match="local"):
        open_host_pool(
            "carrier-pigeon", LAYOUT, epoch="e", clock=SystemClock(), on_pulled=lambda _: True
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
    pool = open_host_pool("local", PoolLayout(64, 32), epoch=sys.argv[1], clock=SystemClock(),
                          on_pulled=lambda ticket: ticket == "t")
    pool.memory[:] = bytes([7]) * len(pool.memory)
    print(pool.transport.describe().decode(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

    @asynccontextmanager
    async def holder(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, bytes]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self.HOLDER, uuid.uuid4().hex, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            yield process, (await process.stdout.readline()).strip()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def test_pulls_from_another_process(self, open_end: Opener) -> None:
        puller = open_end()
        async with self.holder() as (_, peer):
            assert await pull(puller, peer, [1, 2], [3, 4]) == 64
            assert puller.block(3) == puller.block(4) == bytes([7]) * 32
            with pytest.raises(TicketError):
                await pull(puller, peer, [1], [5], "another")

    async def test_a_killed_holder_leaves_nothing(self, open_end: Opener) -> None:
        puller = open_end()
        async with self.holder() as (process, peer):
            process.kill()
            await process.wait()
            with pytest.raises(TransferError):
                await pull(puller, peer, [1], [1])

    async def test_a_stopped_holder_costs_the_timeout(self, open_end: Opener) -> None:
        puller, other = open_end(), open_end()
        other.tickets |= {str(number) for number in range(8)}
        async with self.holder() as (process, peer):
            process.send_signal(signal.SIGSTOP)
            stuck = [
                asyncio.create_task(
                    puller.transport.pull(peer, [1], [1], ticket_id="t", timeout=0.3)
                )
                for _ in range(40)  # more than its socket takes
            ]
            await asyncio.sleep(0)
            for number in range(8):  # others are served meanwhile
                await pull(puller, other.transport.describe(), [1], [2], str(number))
            outcomes = await asyncio.gather(*stuck, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {TransferError}
            process.send_signal(signal.SIGCONT)

    async def test_a_holder_that_goes_on_answers_all(self, open_end: Opener) -> None:
        puller = open_end()
        async with self.holder() as (process, peer):
            process.send_signal(signal.SIGSTOP)
            pulls = []
            for number in range(40):  # a datagram each: more than its socket takes
                pulls.append(asyncio.create_task(pull(puller, peer, [1], [number])))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            process.send_signal(signal.SIGCONT)
            assert await asyncio.gather(*pulls) == [32] * 40

    async def test_a_recycled_descriptor_is_not_trusted(self, open_end: Opener) -> None:
        holder, puller = open_end(), open_end()
        theirs = holder.transport.describe()
        epoch = uuid.uuid4().hex.encode()
        ours = puller.transport.describe()
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
            fake = self.with_fd(puller.transport.describe(), reading if kind == "pipe" else plain)
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


class TestConsent:
    """The questions behind the `local` transport."""

    async def test_nobody_there_is_told_at_once(self) -> None:
        desk = ConsentDesk(uuid.uuid4().hex, lambda _: True)
        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(OSError, match="refused"):
                await desk.ask(uuid.uuid4().hex, "t")
        desk.close()

    async def test_more_than_a_datagram_of_questions(self) -> None:
        epoch = uuid.uuid4().hex
        asked: list[str] = []

        def on_pulled(ticket: str) -> bool:
            asked.append(ticket)
            return True

        holder = ConsentDesk(epoch, on_pulled)
        puller = ConsentDesk(uuid.uuid4().hex, lambda _: False)
        tickets = [f"{number:0200d}" for number in range(1000)]
        async with asyncio.timeout(TIMEOUT):
            answers = await asyncio.gather(*(puller.ask(epoch, ticket) for ticket in tickets))
        assert answers == [True] * 1000
        assert asked == tickets
        holder.close()
        puller.close()

    async def test_closing_fails_what_is_asked(self) -> None:
        epoch = uuid.uuid4().hex
        holder = ConsentDesk(epoch, lambda _: True)
        puller = ConsentDesk(uuid.uuid4().hex, lambda _: False)
        asking = asyncio.create_task(puller.ask(epoch, "t"))
        await asyncio.sleep(0)
        puller.close()
        puller.close()
        with pytest.raises(TransferError):
            await asking
        with pytest.raises(TransferError):
            await puller.ask(epoch, "t")
        holder.close()

    @pytest.mark.parametrize(
        "noise", [b"", b"?", b"x" * 11, b"?" + bytes(8) + b"\xff\xff", b"+" * 99]
    )
    async def test_noise_is_ignored(self, noise: bytes) -> None:
        epoch = uuid.uuid4().hex
        holder = ConsentDesk(epoch, lambda _: True)
        puller = ConsentDesk(uuid.uuid4().hex, lambda _: False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(noise, b"\0kvmesh-kv-" + epoch.encode())
        async with asyncio.timeout(TIMEOUT):
            assert await puller.ask(epoch, "t")
        holder.close()
        puller.close()
