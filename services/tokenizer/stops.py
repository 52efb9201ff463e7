"""Stop strings: find the first one in text that comes in pieces, and never let it out.

Pure. The result does not depend on how the text was cut into pieces, nor on the order
of the stop strings.
"""

import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_OPENING = 3
"""Characters of a stop string that are looked for first: enough to pass over most text."""


class StopMatcher:
    """Looks for stop strings in one completion.

    The match that is complete first wins; of two that end at the same character the
    longer one. Text that a stop string may begin in is held back, exactly as long as
    it may. Cost is proportional to the text, and, while something is held back, to the
    longest stop string.

    `matched` is the stop string that was found, else None. After the `push` that found
    it, `consumed` is how many characters of that piece it took to complete the match.
    """

    __slots__ = ("_held", "_include", "_program", "_states", "consumed", "matched")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Take one or more stop strings, none of them empty (`ValueError` otherwise).

        `include_stop`: the text ends with the stop string instead of before it.
        """
        self._program = _compile(tuple(stops))
        self._include = include_stop
        self._states = [0] * len(self._program.patterns)
        self._held = ""
        self.matched: str | None = None
        self.consumed = 0

    def push(self, text: str) -> str:
        """Take the next piece; return the text that can be sent now, perhaps empty.

        After a match nothing more is ever returned.
        """
        if self.matched is not None:
            return ""
        start = 0
        if not self._held:
            candidate = self._program.opening.search(text)
            if candidate is None:
                return text
            start = candidate.start()
        whole = self._held + text
        stop = self._scan(text, start)
        if stop is None:
            cut = len(whole) - max(self._states)
            self._held = whole[cut:]
            return whole[:cut]
        end = len(self._held) + self.consumed
        self.matched = stop
        self._held = ""
        return whole[: end if self._include else end - len(stop)]

    def skip(self, text: str) -> str:
        """Take the next piece as `push` does, but let no stop string end in it.

        One may begin in it, and is held back then.
        """
        if self.matched is not None:
            return ""
        self._scan(text, 0, counts=False)
        whole = self._held + text
        cut = len(whole) - max(self._states)
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """Return what is held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str, start: int, *, counts: bool = True) -> str | None:
        """Advance every pattern over `text[start:]`; return the one completed first.

        Unless it `counts`, a completed one is passed over.
        """
        states = self._states
        patterns = self._program.patterns
        for position in range(start, len(text)):
            char = text[position]
            for index, (stop, borders) in enumerate(patterns):
                state = states[index]
                while state and stop[state] != char:
                    state = borders[state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        if counts:
                            self.consumed = position + 1
                            return stop
                        state = borders[state - 1]
                states[index] = state
        return None


class _Program(NamedTuple):
    """What is prepared once for a list of stop strings.

    `opening` finds where a stop string may begin, the text's end included. `patterns`
    has the stop strings, longest first, each with its borders (Knuth-Morris-Pratt).
    """

    opening: re.Pattern[str]
    patterns: tuple[tuple[str, Sequence[int]], ...]


@lru_cache(maxsize=64)  # clients repeat their stop lists; a bound for those who don't
def _compile(stops: tuple[str, ...]) -> _Program:
    if not all(stops):
        raise ValueError("a stop string is empty")
    if not stops:
        raise ValueError("no stop strings")
    ordered = sorted(set(stops), key=len, reverse=True)
    opening = "|".join(map(_opening, ordered))
    return _Program(re.compile(opening), tuple((stop, _borders(stop)) for stop in ordered))


def _opening(stop: str) -> str:
    """Return a pattern for the first characters of `stop`, fewer only at a text's end."""
    head = stop[:_OPENING]
    cut = [re.escape(head[:size]) + r"\Z" for size in range(1, len(head))]
    return "|".join([re.escape(head), *cut])


def _borders(stop: str) -> Sequence[int]:
    """Return, for each prefix of `stop`, the length of its longest proper border."""
    borders = array("I", bytes(4 * len(stop)))
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
