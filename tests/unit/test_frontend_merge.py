"""Several choices side by side."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvmesh.errors import EngineError
from services.frontend.answer import Piece
from services.frontend.merge import MAX_WAITING, merged


class Scripted:
    """A choice that gives its pieces when told to, and notes when it is closed."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.script: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.given = 0
        self.closed = asyncio.Event()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        try:
            while (text := await self.script.get()) is not None:
                if isinstance(text, Exception):
                    raise text
                self.given += 1
                yield Piece(text, 1, index=self.index)
        finally:
            self.closed.set()


async def test_pieces_come_as_they_are_ready_and_in_order() -> None:
    one, two = Scripted(0), Scripted(1)
    async with aclosing(merged([one.pieces(), two.pieces()])) as pieces:
        two.script.put_nowait("b")
        assert (await anext(pieces)).text == "b"
        for text in ("x", "y"):
            one.script.put_nowait(text)
        assert [(await anext(pieces)).text for _ in range(2)] == ["x", "y"]
        one.script.put_nowait(None)
        two.script.put_nowait("c")
        assert (await anext(pieces)).index == 1
        two.script.put_nowait(None)
        assert [piece async for piece in pieces] == []


async def test_the_first_failure_ends_all() -> None:
    one, two = Scripted(0), Scripted(1)
    async with aclosing(merged([one.pieces(), two.pieces()])) as pieces:
        one.script.put_nowait("a")
        await anext(pieces)
        two.script.put_nowait(EngineError("broken"))
        with pytest.raises(EngineError, match="broken"):
            await anext(pieces)
    assert one.closed.is_set()
    assert two.closed.is_set()


async def test_a_reader_that_leaves_ends_all() -> None:
    choices = [Scripted(index) for index in range(3)]
    async with aclosing(merged([choice.pieces() for choice in choices])) as pieces:
        for choice in choices:
            choice.script.put_nowait("a")
        await anext(pieces)
    assert all(choice.closed.is_set() for choice in choices)


async def test_a_slow_reader_holds_the_choices_back() -> None:
    one = Scripted(0)
    async with asyncio.timeout(10), aclosing(merged([one.pieces()])) as pieces:
        for _ in range(MAX_WAITING * 3):
            one.script.put_nowait("a")
        await anext(pieces)
        for _ in range(MAX_WAITING * 10):
            await asyncio.sleep(0)
        assert MAX_WAITING <= one.given <= MAX_WAITING + 2
