"""The rules of blocking queries, and what to believe after an outage. No I/O here."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.discovery.consul_service import Sighting
from kvmesh.discovery.entry import Entry


@dataclass(frozen=True, slots=True)
class Pace:
    """Timings of a watch, in seconds."""

    wait: int = 30
    period: float = 0.1
    pause: float = 1.0
    grace: float = 10.0
    holding_wait: int = 1


def backoff(failures: int, rng: random.Random) -> float:
    """Return seconds before the next try, after so many failures in a row (1 or more).

    Doubles from 0.1 s up to 2 s, less up to a half, so that a mesh doesn't come all at once
    when Consul is back, but comes within a TTL.
    """
    return min(2.0, 0.1 * 2.0 ** min(failures - 1, 10)) * rng.uniform(0.5, 1.0)


class Cursor:
    """Where the next blocking query goes on."""

    def __init__(self, pace: Pace) -> None:
        self.index = 0
        self._pace = pace
        self._unusable = False

    def advance(self, header: str) -> bool:
        """Take the index of an answer. False: the index space is a new one, ask from 0."""
        index = int(header) if header.isascii() and header.isdigit() else 0
        self._unusable = index < 1
        if self._unusable:
            # Asking with 0 wouldn't block at all, and 1 is below any index in use.
            self.index = 1
            return True
        went_back = index < self.index
        self.index = 0 if went_back else index
        return not went_back

    def restart(self) -> None:
        """Forget the index: who answers next may count otherwise."""
        self.index = 0

    def pause(self, elapsed: float) -> float:
        """Return how long to rest before the next query, `elapsed` after the last began.

        Each answer costs a rest, so a registry that changes all the time, or an agent that
        doesn't block, can't keep us busy.
        """
        return self._pace.pause if self._unusable else max(0.0, self._pace.period - elapsed)


class Roster:
    """The live entries of one service, as far as one can know.

    After an interruption Consul may have come back empty, and processes need a moment to
    register again: entries that are just missing are kept for `grace` seconds. One that is
    there and not alive is dead at once, unless Consul itself is in doubt: it was away or
    frozen, and has kept heartbeats waiting.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._entries: dict[tuple[str, str], Entry] = {}
        self._missing: dict[tuple[str, str], float] = {}
        self._interrupted = False
        self._forgiving_until = float("-inf")
        self._doubting_until = float("-inf")

    @property
    def entries(self) -> Iterable[Entry]:
        """Live and kept entries."""
        return self._entries.values()

    @property
    def is_holding(self) -> bool:
        """True while entries are shown that Consul doesn't have."""
        return bool(self._missing)

    def interrupt(self) -> None:
        """Note that the connection broke or the index went back."""
        self._interrupted = True

    def doubt(self, now: float) -> None:
        """Note that Consul has kept heartbeats waiting: whom it thinks dead may not be."""
        self._doubting_until = now + self._grace

    def observe(self, sightings: Iterable[Sighting], now: float) -> None:
        """Take an answer."""
        if self._interrupted:
            self._forgiving_until = now + self._grace
            self._interrupted = False
        seen = {sighting.key: sighting for sighting in sightings}
        alive = {key: sighting.entry for key, sighting in seen.items() if sighting.alive}
        kept: dict[tuple[str, str], Entry] = {}
        missing: dict[tuple[str, str], float] = {}
        for key in self._entries.keys() - alive.keys():
            until = self._doubting_until
            if key not in seen:
                until = max(until, self._forgiving_until)
            elif now >= until:
                continue
            since = self._missing.get(key, now if now < until else None)
            if since is not None and now - since < self._grace:
                kept[key], missing[key] = self._entries[key], since
        self._entries, self._missing = kept | alive, missing
