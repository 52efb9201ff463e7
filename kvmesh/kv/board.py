"""Which tickets are open, as memory that peers read: what makes a copied block valid.

One word for each ticket, which holds the ticket's number while it is open. The holder
clears it before it uses the blocks for anything else, so a peer that finds the number there
*after* it has copied them knows that they were whole, without asking anybody. It then
clears the word itself: a ticket is used once, and its holder sees that it was.
"""

import sys

SLOTS = 1 << 15
WORD_BYTES = 8
BOARD_BYTES = SLOTS * WORD_BYTES
CLOSED = bytes(WORD_BYTES)
"""The word of no ticket."""


def slot_of(number: int) -> int:
    """Return the slot of a ticket's number."""
    return number % SLOTS


def word_of(number: int) -> bytes:
    """Return what is in the slot while the ticket is open."""
    return number.to_bytes(WORD_BYTES, sys.byteorder)


class Board:
    """The holder's side, over `BOARD_BYTES` of zeroed memory. Numbers are never used twice."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("B").cast("Q")
        self._count = 0
        self._numbers: dict[str, int] = {}
        self._tickets: dict[int, str] = {}

    def open(self, ticket_id: str) -> int:
        """Open a ticket and return its number, above 0.

        Of more tickets than there are slots the oldest is closed. Raises `ValueError` for one
        that is open already.
        """
        if ticket_id in self._numbers:
            raise ValueError(f"ticket {ticket_id} is open already")
        self._count = number = self._count + 1
        oldest = self._tickets.get(number - SLOTS)
        if oldest is not None:
            self.close(oldest)
        self._words[slot_of(number)] = number  # before `used` can look for it
        self._numbers[ticket_id] = number
        self._tickets[number] = ticket_id
        return number

    def close(self, ticket_id: str) -> None:
        """Close a ticket. No effect on one that is not open."""
        number = self._numbers.pop(ticket_id, None)
        if number is not None:
            del self._tickets[number]
            self._words[slot_of(number)] = 0

    def ticket(self, number: int) -> str | None:
        """Return the open ticket of a number."""
        return self._tickets.get(number)

    def used(self) -> list[int]:
        """Return the numbers of those open tickets that peers have used up; from any thread."""
        words = self._words
        return [number for number in tuple(self._tickets) if words[slot_of(number)] != number]

    def release(self) -> None:
        """Let go of the memory. Nothing but `ticket` may be called afterwards."""
        self._words.release()
