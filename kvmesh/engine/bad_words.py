"""Token sequences that must not come about. Pure."""

from collections.abc import Iterable, Sequence


class BadWords:
    """Which token would complete one of some sequences, none of them empty.

    A sequence counts only where all of it is generated: a prompt that ends in its
    beginning does not matter. `lasts` are all tokens that may ever be forbidden.
    """

    __slots__ = ("_always", "_behind", "lasts")

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        always: set[int] = set()
        # By the token before the last: only few have to be compared behind each token.
        self._behind: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in sequences:
            *prefix, last = sequence
            if prefix:
                self._behind.setdefault(prefix[-1], []).append((prefix, last))
            else:
                always.add(last)
        self._always = frozenset(always)
        pairs = [pair for some in self._behind.values() for pair in some]
        self.lasts = self._always.union(last for _, last in pairs)

    def banned(self, tokens: Sequence[int], start: int) -> frozenset[int]:
        """Return what the next token must not be; what is generated begins at `start`."""
        if len(tokens) <= start:
            return self._always
        found = [
            last
            for prefix, last in self._behind.get(tokens[-1], ())
            if len(tokens) - len(prefix) >= start and tokens[-len(prefix) :] == prefix
        ]
        return self._always.union(found) if found else self._always
