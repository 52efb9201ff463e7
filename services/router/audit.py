"""Whether router and engines name the same blocks: what was expected against what was so.

Each answer says how much of its prompt had been cached. Now and then that is not what the
router thought, since caches change while a request is on its way. A worker whose answers
keep disagreeing hashes differently, has another block size than it says, or tells of
events that do not happen: it is flagged, because routing by its cache is guesswork. What
is compared is what the worker claims to have cached, whether or not the router counts it:
so a worker whose cache is not counted any more can still come to agree. Pure.
"""

import logging
from collections import deque
from collections.abc import Container
from typing import NamedTuple

from services.router.reservations import Life

log = logging.getLogger(__name__)

WINDOW = 16
"""Answers of a worker that are looked at, the last ones."""

FLAG_AT = 12
"""So many of these disagree: the worker is flagged."""

CLEAR_AT = 4
"""So few of these disagree: it is not flagged any more."""

TOLERANCE = 0.25
"""A difference up to this share of the greater figure is agreement."""


class CacheClaim(NamedTuple):
    """Tokens of a prompt that a worker should have cached: `stored` is what it told of,
    `expected` has also what earlier requests may have left by the time this one starts.
    """

    stored: int
    expected: int


NO_CLAIM = CacheClaim(0, 0)


class Audit:
    """The record of all workers. Also sums of expected and achieved cache hits, in tokens."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.expected_tokens = 0
        self.cached_tokens = 0
        self.disagreements = 0
        self._records: dict[Life, deque[bool]] = {}
        self._flagged: set[Life] = set()

    def flagged(self, life: Life) -> bool:
        """Return whether a worker's answers keep disagreeing with what was expected."""
        return life in self._flagged

    def answered(
        self, life: Life, *, prompt_tokens: int, claim: CacheClaim, cached: int, block_size: int
    ) -> None:
        """Take what a worker had cached of a prompt, and what was to be expected of it."""
        stored, expected = claim
        self.prompt_tokens += prompt_tokens
        self.expected_tokens += expected
        self.cached_tokens += cached
        greater = max(expected, cached)
        if greater < max(1, block_size):
            return
        difference = max(stored - cached, cached - expected)
        disagrees = difference >= max(1, block_size) and difference > TOLERANCE * greater
        if not disagrees and expected - stored >= max(1, block_size):
            return  # anything between would have been right: that shows nothing
        self.disagreements += disagrees
        record = self._records.setdefault(life, deque(maxlen=WINDOW))
        record.append(disagrees)
        self._judge(life, sum(record), expected, cached)

    def keep(self, lives: Container[Life]) -> None:
        """Forget all others."""
        self._records = {life: record for life, record in self._records.items() if life in lives}
        self._flagged = {life for life in self._flagged if life in lives}

    def _judge(self, life: Life, disagreeing: int, expected: int, cached: int) -> None:
        if disagreeing >= FLAG_AT and life not in self._flagged:
            self._flagged.add(life)
            log.warning(
                "%s: %d of its last %d answers disagree with what it claims to have cached "
                "(the last: %d tokens expected, %d found): do router and engine hash alike?",
                life.worker_id,
                disagreeing,
                WINDOW,
                expected,
                cached,
            )
        elif disagreeing <= CLEAR_AT and life in self._flagged:
            self._flagged.discard(life)
            log.info("%s: its answers agree again with what was expected", life.worker_id)
