"""Several choices of one request, made side by side and passed on as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from services.frontend.answer import Piece

MAX_WAITING = 256
"""Pieces that wait for a slow reader; behind them each choice has its own bound."""


async def merged(
    answers: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all `answers` as they come, those of each in order.

    Raises what the first one fails with. However it ends, the others are ended too.
    """
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(MAX_WAITING)

    async def carry(answer: AsyncGenerator[Piece, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    await queue.put(piece)
        except Exception as error:  # noqa: BLE001 - top of a task: raised where the pieces are read
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(carry(answer)) for answer in answers]
    try:
        running = len(tasks)
        while running:
            piece = await queue.get()
            if isinstance(piece, Piece):
                yield piece
            elif piece is not None:
                raise piece
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
