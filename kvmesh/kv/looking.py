"""Waiting for the blocks of a ticket: by looking at its word on the holder's board.

Nobody tells whoever waits: the holder doesn't know them, and a message would hold up the read
that follows it. A look is a one-sided read of a word.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvmesh.clock import Clock
from kvmesh.errors import TicketError, TransferError
from kvmesh.kv.board import word_of

_LEAST_SECONDS = 0.0005
_MOST_SECONDS = 0.02
_SHARE = 0.02  # of the time waited so far: that much later than it could a pull begins


async def await_whole(
    look: Callable[[], Awaitable[int]], number: int, timeout: float, clock: Clock
) -> None:
    """Return once `look` finds the word of a whole ticket.

    Raises `TicketError` when it finds another one, `TransferError` after `timeout` seconds.
    """
    started = clock.now()
    try:
        async with asyncio.timeout(timeout):
            while (word := await look()) != word_of(number):
                if word != word_of(number, whole=False):
                    raise TicketError("the holder does not hold this ticket any more")
                waited = clock.now() - started
                await asyncio.sleep(min(max(waited * _SHARE, _LEAST_SECONDS), _MOST_SECONDS))
    except TimeoutError as error:
        raise TransferError(f"the blocks were not computed within {timeout:g} s") from error
