"""Which tickets are open, as memory that peers read: what makes a copied block valid.

One word for each ticket, which holds the ticket's number while it is open, and whether its
blocks are whole or still being computed. The holder clears it before it uses the blocks for
anything else, so a peer that finds it whole *after* it has copied them knows that they were,
without asking anybody. It then clears the word itself: a ticket is used once, and its holder
sees that it was.
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


def word_of(number: int, *, whole: bool = True) -> int:
    """Return what is in the slot while the ticket is open, and its blocks are whole or not yet."""
    return number << 1 | whole


def read_word(raw: bytes) -> int:
    """Return a word from its bytes in the board."""
    return int.from_bytes(raw, sys.byteorder)


class Board:
    """The holder's side, over `BOARD_BYTES` of zeroed memory. Numbers are never used twice."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("B").cast("Q")
        self._count = 0
        self._numbers: dict[str, int] = {}
        self._tickets: dict[int, str] = {}

    def open(self, ticket_id: str, *, whole: bool = True) -> int:
        """Open a ticket, whose blocks are whole or not yet, and return its number, above 0.

        Of more tickets than there are slots the oldest is closed. Raises `ValueError` for one
        that is open already.
        """
        if ticket_id in self._numbers:
            raise ValueError(f"ticket {ticket_id} is open already")
        self._count = number = self._count + 1
        oldest = self._tickets.get(number - SLOTS)
        if oldest is not None:
            self.close(oldest)
        self._words[slot_of(number)] = word_of(number, whole=whole)  # before `used` can look for it
        self._numbers[ticket_id] = number
        self._tickets[number] = ticket_id
        return number

    def fulfil(self, ticket_id: str) -> None:
        """Say that a ticket's blocks are whole. No effect on one that is not open."""
        number = self._numbers.get(ticket_id)
        if number is not None:
            self._words[slot_of(number)] = word_of(number)

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
        numbers = tuple(self._tickets)
        return [number for number in numbers if words[slot_of(number)] >> 1 != number]

    def release(self) -> None:
        """Let go of the memory. Nothing but `ticket` may be called afterwards."""
        self._words.release()
