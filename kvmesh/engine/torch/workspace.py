"""A second copy of the KV of decoding sequences, laid out for speed.

Attention over a pool gathers all blocks of all sequences at each layer of each step. Here
each sequence's KV lies in one piece instead, is gathered once when it starts to decode,
and grows by a token a step. What does not fit is left to the pool.
"""

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvmesh.engine.torch.memory import KvShape
from kvmesh.engine.torch.plan import Span
from kvmesh.engine.torch.sequence import TorchSequence

_LEAST_TOKENS = 256  # capacities are this times powers of two
_ROWS = 4  # a shelf grows by this many sequences


@dataclass(frozen=True, slots=True)
class ShelfGroup:
    """A `Group` whose KV lies on a shelf. `kv` is [layers, 2, rows, kv_heads, capacity, head_dim].

    `rows` counts up from 0, `places` is the number of each row's newest token.
    """

    start: int
    stop: int
    mask: Any
    kv: Any
    rows: Any
    places: Any
    tokens: int

    def past(self, layer: int, kv: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """Add the newest; return views."""
        count = self.stop - self.start
        keys, values = self.kv[layer, 0, :count], self.kv[layer, 1, :count]
        keys[self.rows, :, self.places] = key
        values[self.rows, :, self.places] = value
        return keys[:, :, : self.tokens], values[:, :, : self.tokens]


class Shelf:
    """Sequences of up to `capacity` tokens, one a row, without gaps.

    `tokens` says how many tokens of each row's sequence are right.
    """

    def __init__(self, shape: KvShape, capacity: int, rows: int) -> None:
        self.capacity = capacity
        self.rows = rows
        self._sequences: list[TorchSequence | None] = [None] * rows
        self._tokens = [0] * rows
        # Zeroed, and taken from the machine only when it is written to.
        memory = mmap.mmap(-1, rows * capacity * shape.token_bytes)
        self.kv = (
            torch.frombuffer(memory, dtype=torch.uint8)
            .view(shape.dtype)
            .view(shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim)
        )

    def seat(self, pool: Any, spans: Sequence[Span]) -> list[Span]:
        """Give each span's sequence one of the first rows; return the spans in row order."""
        count = len(spans)
        placed: list[Span | None] = [None] * count
        others = []
        row_of = {sequence: row for row, sequence in enumerate(self._sequences)}
        for span in spans:
            row = row_of.get(span.sequence, count)
            if row < count and self._tokens[row] == span.first:
                placed[row] = span
            else:
                others.append(span)
        for row, known in enumerate(placed):
            if known is None:
                placed[row] = span = others.pop()
                self._fill(pool, row, span)
        for row in range(count, self.rows):
            self._sequences[row] = None
        seated = [span for span in placed if span is not None]
        for row, span in enumerate(seated):
            self._tokens[row] = span.length
        return seated

    def _fill(self, pool: Any, row: int, span: Span) -> None:
        """Copy what a sequence has so far. `pool` is as `KvMemory.kv`."""
        self._sequences[row] = span.sequence
        size = pool.shape[3]
        blocks = torch.tensor(span.blocks[: -(-span.first // size)])
        for layer in range(pool.shape[1]):
            found = pool[:, layer].index_select(0, blocks)  # [blocks, 2, size, heads, dim]
            lined = found.permute(1, 3, 0, 2, 4).flatten(2, 3)  # [2, heads, tokens, dim]
            self.kv[layer, :, row, :, : span.first] = lined[:, :, : span.first]


class Workspace:
    """Shelves of several capacities, within a budget of bytes. Used by one thread."""

    def __init__(self, shape: KvShape, budget: int) -> None:
        self._shape = shape
        self._budget = budget
        self._shelves: dict[int, Shelf] = {}

    def seat(
        self, pool: Any, spans: Iterable[Span]
    ) -> tuple[list[tuple[Shelf, list[Span]]], list[Span]]:
        """Return shelves with the spans on them, in row order, and the spans left over."""
        by_capacity: dict[int, list[Span]] = {}
        for span in spans:
            by_capacity.setdefault(_capacity(span.length), []).append(span)
        for unused in self._shelves.keys() - by_capacity.keys():
            del self._shelves[unused]
        seated, left = [], []
        for capacity in sorted(by_capacity):
            asking = by_capacity[capacity]
            shelf = self._shelf(capacity, len(asking))
            if shelf is None:
                left += asking
            else:
                seated.append((shelf, shelf.seat(pool, asking)))
        return seated, left

    def _shelf(self, capacity: int, rows: int) -> Shelf | None:
        shelf = self._shelves.get(capacity)
        if shelf is None or shelf.rows < rows:
            self._shelves.pop(capacity, None)
            rows = -(-rows // _ROWS) * _ROWS
            taken = sum(other.rows * capacity for capacity, other in self._shelves.items())
            if (taken + rows * capacity) * self._shape.token_bytes > self._budget:
                return None
            shelf = self._shelves[capacity] = Shelf(self._shape, capacity, rows)
        return shelf


def _capacity(tokens: int) -> int:
    capacity = _LEAST_TOKENS
    while capacity < tokens:
        capacity *= 2
    return capacity
