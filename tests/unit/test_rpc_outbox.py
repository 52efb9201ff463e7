"""The sender that every stream has."""

import asyncio
from types import SimpleNamespace

import pytest

from kvmesh.errors import OverloadedError
from kvmesh.rpc.outbox import MAX_BACKLOG, Outbox


def new() -> SimpleNamespace:
    return SimpleNamespace(entries=[])


async def running(outbox: Outbox[SimpleNamespace], write) -> asyncio.Task[None]:
    task = asyncio.create_task(outbox.run(write))
    await asyncio.sleep(0)
    return task


async def test_what_gathers_in_one_turn_goes_as_one_message() -> None:
    sent: list[list[int]] = []

    async def write(message: SimpleNamespace) -> None:
        sent.append(message.entries)

    outbox = Outbox(new)
    task = await running(outbox, write)
    for n in range(5):
        outbox.next().entries.append(n)
    await outbox.flushed()
    assert sent == [[0, 1, 2, 3, 4]]
    task.cancel()


async def test_what_gathers_during_a_write_goes_as_one_message_after_it() -> None:
    sent: list[list[int]] = []
    gate = asyncio.Event()

    async def write(message: SimpleNamespace) -> None:
        sent.append(message.entries)
        await gate.wait()

    outbox = Outbox(new)
    task = await running(outbox, write)
    outbox.next().entries.append(0)
    await asyncio.sleep(0)
    for n in range(1, 4):
        outbox.next().entries.append(n)
        await asyncio.sleep(0)
    gate.set()
    await outbox.flushed()
    assert sent == [[0], [1, 2, 3]]
    task.cancel()


async def test_messages_are_capped_and_keep_their_order() -> None:
    sent: list[list[int]] = []

    async def write(message: SimpleNamespace) -> None:
        sent.append(message.entries)

    outbox = Outbox(new, max_entries=2)
    task = await running(outbox, write)
    for n in range(5):
        outbox.next().entries.append(n)
    await outbox.flushed()
    assert sent == [[0, 1], [2, 3], [4]]
    task.cancel()


async def test_slots_live_as_long_as_their_message_is_unsent() -> None:
    async def write(message: SimpleNamespace) -> None:
        assert 7 not in outbox.slots

    outbox = Outbox(new)
    task = await running(outbox, write)
    outbox.slots[7] = outbox.next()
    assert 7 in outbox.slots
    await outbox.flushed()
    assert outbox.slots == {}
    task.cancel()


async def test_a_peer_that_never_reads_ends_the_stream_and_adding_still_never_fails() -> None:
    async def write(message: SimpleNamespace) -> None:
        await asyncio.Event().wait()

    outbox = Outbox(new, max_entries=1)
    task = await running(outbox, write)
    outbox.next()
    await asyncio.sleep(0)
    for _ in range(MAX_BACKLOG + 10):
        outbox.next().entries.append(1)
    with pytest.raises(OverloadedError):
        await task


async def test_what_write_raises_ends_run() -> None:
    async def write(message: SimpleNamespace) -> None:
        raise ConnectionError

    outbox = Outbox(new)
    task = await running(outbox, write)
    outbox.next()
    with pytest.raises(ConnectionError):
        await task
