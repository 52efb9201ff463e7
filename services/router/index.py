"""Which worker has which KV blocks cached: from a block's chained hash to a set of workers.

A set of workers is an int with one bit for each worker's seat in the index, so that one
walk over a prompt's hashes gives the overlap of all workers. Pure: no clock, no task.

Hashes are chained, so a block that a worker has is of use only with all blocks before it;
`overlaps` counts leading blocks and nothing else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

SWEEP_STEP = 8192
"""Hashes looked at in one call of `sweep`: less than a millisecond."""


class Claim:
    """Blocks that a seat is expected to have soon. Made and ended by `PrefixIndex` only."""

    __slots__ = ("hashes", "seat")

    def __init__(self, seat: int, hashes: list[int]) -> None:
        self.seat = seat
        self.hashes = hashes


class PrefixIndex:
    """The caches of all workers of one model and block size.

    A worker takes a seat with `open` and leaves it with `close`. What it had is out of
    all answers at once; the memory comes back by calls of `sweep`, and the seat is given
    to another only then. Storing what is there, removing what is not, and anything told
    of a seat in any order, do no harm.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self.counts: list[int] = []
        """How many blocks each seat has. Read only."""
        self._claims: list[int] = []
        self._open = 0
        self._closed = 0
        self._free: list[int] = []
        self._swept: set[int] = set()
        self._sweeping: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        """Return how many hashes it holds, those that wait for `sweep` included."""
        return len(self._holders)

    @property
    def empty(self) -> bool:
        """Whether nobody has a seat."""
        return not self._open

    @property
    def expected(self) -> int:
        """How many hashes are expected to be cached soon and are not."""
        return len(self._expected)

    def open(self) -> int:
        """Return a new seat, with nothing cached."""
        if self._free:
            seat = self._free.pop()
        else:
            seat = len(self.counts)
            self.counts.append(0)
            self._claims.append(0)
        self._open |= 1 << seat
        return seat

    def close(self, seat: int) -> None:
        """Give a seat up."""
        self._open &= ~(1 << seat)
        if self.counts[seat]:
            self.counts[seat] = 0
            self._closed |= 1 << seat
        else:
            self._retire(seat)

    def hashes(self, seat: int) -> set[int]:
        """Return the blocks of a seat. Looks at every hash: for tests and inspection."""
        bit = 1 << seat & self._open
        return {block for block, holders in self._holders.items() if holders & bit}

    def store(self, seat: int, hashes: Iterable[int], bound: int) -> None:
        """Note that a seat has blocks, up to `bound` of them in all."""
        holders, bit = self._holders, 1 << seat
        room = bound - self.counts[seat]
        before = after = bit
        for block in hashes:
            old = holders.get(block, 0)
            if old & bit:
                continue
            if room <= 0:
                break
            room -= 1
            if old == 0:
                holders[block] = bit
            else:
                # Neighbours mostly have the same holders: they share one int.
                if old != before:
                    before, after = old, old | bit
                holders[block] = after
        self.counts[seat] = bound - room

    def remove(self, seat: int, hashes: Iterable[int]) -> None:
        """Note that a seat has blocks no more."""
        holders, bit = self._holders, 1 << seat
        gone = 0
        before = after = bit
        for block in hashes:
            old = holders.get(block, 0)
            if not old & bit:
                continue
            gone += 1
            if old == bit:
                del holders[block]
            else:
                if old != before:
                    before, after = old, old ^ bit
                holders[block] = after
        self.counts[seat] -= gone

    def overlaps(self, hashes: Iterable[int]) -> dict[int, int]:
        """Return how many leading blocks each seat has, or is expected to have soon.

        Seats with none are left out. One step for each block until nobody has it.
        """
        found: dict[int, int] = {}
        stored, expected = self._holders.get, self._expected.get
        current, depth = self._open, 0
        some_expected = bool(self._expected)
        before = -1
        for block in hashes:
            holders = stored(block, 0)
            if some_expected and (soon := expected(block, 0)):
                holders |= soon
            if holders is before:  # as mostly: neighbours share one int
                depth += 1
                continue
            before = holders
            still = current & holders
            if still != current:
                if depth:
                    _note(found, current ^ still, depth)
                if not still:
                    return found
                current = still
            depth += 1
        if depth:
            _note(found, current, depth)
        return found

    def stored(self, seat: int, hashes: Sequence[int]) -> int:
        """Return how many leading blocks a seat has, as far as it has told."""
        holders, bit = self._holders, 1 << seat & self._open
        for depth, block in enumerate(hashes):
            if not holders.get(block, 0) & bit:
                return depth
        return len(hashes)

    def expect(self, seat: int, hashes: Sequence[int]) -> Claim:
        """Count blocks as a seat's until `settle`: it was given a request that makes them."""
        holders, expected, bit = self._holders, self._expected, 1 << seat
        claimed = []
        for block in hashes:
            soon = expected.get(block, 0)
            if not (soon | holders.get(block, 0)) & bit:
                expected[block] = soon | bit if soon else bit  # neighbours share one int
                claimed.append(block)
        self._claims[seat] += 1
        return Claim(seat, claimed)

    def settle(self, claim: Claim) -> None:
        """End a claim, once only: what came of it was stored by now, or never will be."""
        expected, bit = self._expected, 1 << claim.seat
        for block in claim.hashes:
            soon = expected.get(block, 0) & ~bit
            if soon:
                expected[block] = soon
            else:
                expected.pop(block, None)
        self._claims[claim.seat] -= 1
        if claim.seat in self._swept and not self._claims[claim.seat]:
            self._swept.discard(claim.seat)
            self._free.append(claim.seat)

    def sweep(self, step: int = SWEEP_STEP) -> None:
        """Go on freeing the memory of closed seats; to be called now and then."""
        if self._sweeping is None:
            if not self._closed:
                return
            self._sweeping = (self._closed, list(self._holders))
        closed, left = self._sweeping
        holders = self._holders
        for block in left[-step:]:
            old = holders.get(block, 0)
            if old & closed:
                if still := old & ~closed:
                    holders[block] = still
                else:
                    del holders[block]
        del left[-step:]
        if not left:
            self._sweeping = None
            self._closed &= ~closed
            for seat in _seats(closed):
                self._retire(seat)

    def _retire(self, seat: int) -> None:
        if self._claims[seat]:
            self._swept.add(seat)
        else:
            self._free.append(seat)


class Recent:
    """The blocks of a worker that tells of none: what was placed on it lately, so many.

    Least recently used blocks are forgotten first, a parent after its children.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, hashes: Sequence[int]) -> list[int]:
        """Note that a prompt's blocks were computed; return those forgotten for it."""
        blocks = self._blocks
        for block in reversed(hashes[: self._bound]):
            blocks[block] = None
            blocks.move_to_end(block)
        surplus = len(blocks) - self._bound
        return [blocks.popitem(last=False)[0] for _ in range(surplus)]


_BITS = [[bit for bit in range(8) if octet >> bit & 1] for octet in range(256)]


def _note(found: dict[int, int], seats: int, depth: int) -> None:
    for seat in _seats(seats):
        found[seat] = depth


def _seats(mask: int) -> list[int]:
    """Return the numbers of the bits of a mask."""
    if mask & (mask - 1) == 0:
        return [mask.bit_length() - 1] if mask else []
    octets = mask.to_bytes(-(-mask.bit_length() // 8), "little")
    return [8 * at + bit for at, octet in enumerate(octets) if octet for bit in _BITS[octet]]
