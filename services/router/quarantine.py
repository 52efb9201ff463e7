"""Which workers, and which pairs of a prefill and a decode worker, are left alone for a while.

Frontends tell of each part of a request that a worker did or failed. A worker, or a pair that
fails to hand KV over, which fails as often as it does its part is quarantined: it gets no
requests until a hold is over, then one at a time, until one of these has done well. Only what
is a worker's fault is told, and the others' good requests outweigh one caller's bad ones.
"""

import logging
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.clock import Clock
from kvmesh.types import Leg
from services.router.reservations import Life
from services.router.worker import WorkerState

log = logging.getLogger(__name__)

OUTCOMES = 16
"""Outcomes that are looked at, the last ones."""

Subject = tuple[Life, ...]
"""What can be quarantined: one worker, or the prefill and the decode worker of a pair."""


@dataclass(frozen=True, slots=True)
class QuarantineConfig:
    """When workers that fail are left alone, and for how long."""

    failures: int = field(
        default=4,
        metadata={
            "help": "failures that quarantine a worker, if it fails half of its requests; 0: never",
            "min": 0,
            "max": OUTCOMES,
        },
    )
    window_seconds: float = field(
        default=30.0, metadata={"help": "for how long an outcome counts", "min": 0.001}
    )
    hold_seconds: float = field(
        default=1.0,
        metadata={"help": "the first hold; doubled each time it fails again", "min": 0.001},
    )
    max_hold_seconds: float = field(
        default=60.0, metadata={"help": "the longest hold", "min": 0.001}
    )
    timeout_seconds: float = field(
        default=10.0,
        metadata={"help": "a request that runs out of time is a failure if it had so much"},
    )


class _Record:
    """What is known of one subject. `trips`: how often it was quarantined lately."""

    __slots__ = ("closed_at", "held", "outcomes", "probe", "trips", "until")

    def __init__(self) -> None:
        self.outcomes: deque[tuple[float, bool]] = deque(maxlen=OUTCOMES)
        self.held = False
        self.until = 0.0
        self.trips = 0
        self.probe: Trial | None = None
        self.closed_at = 0.0


class Quarantine:
    """The records of all workers and pairs of this router.

    A subject is free, held until a time, or, after that, tried by one request at a time.
    """

    def __init__(self, config: QuarantineConfig, clock: Clock) -> None:
        self.config = config
        self._clock = clock
        self._records: dict[Subject, _Record] = {}
        self._held: dict[Subject, _Record] = {}

    @property
    def held(self) -> tuple[Subject, ...]:
        """Those that are quarantined, or tried and not yet trusted again."""
        return tuple(self._held)

    def trusted(self, workers: Sequence[WorkerState]) -> Sequence[WorkerState]:
        """Return the workers that may get a request now; never nobody.

        Where all are quarantined, those that were so least often.
        """
        if not self._held:
            return workers
        trusted = [each for each in workers if self._admits((each.life,))]
        if trusted or not workers:
            return trusted
        trips = [self._held[each.life,].trips for each in workers]
        least = min(trips)
        return [each for each, count in zip(workers, trips, strict=True) if count == least]

    def partners(self, decode: Life, workers: Sequence[WorkerState]) -> Sequence[WorkerState]:
        """Return the prefill workers that may compute for a decode worker now; maybe nobody."""
        if not self._held:
            return workers
        return [w for w in workers if self._admits((w.life,)) and self._admits((w.life, decode))]

    def trial(self, decode: Life, prefill: Life | None) -> "Trial":
        """Follow a request that was planned on these."""
        trial = Trial(self, decode, prefill, self._clock.now())
        if self._held:
            for subject in trial.subjects:
                record = self._held.get(subject)
                if record is not None and record.probe is None:
                    record.probe = trial
        return trial

    def keep(self, lives: Container[Life]) -> None:
        """Forget all others, and pairs of whom one is another."""
        self._records = _kept(self._records, lives)
        self._held = _kept(self._held, lives)

    def is_long(self, since: float) -> bool:
        """Return whether a request that was planned then had time enough. For `Trial` alone."""
        return self._clock.now() - since >= self.config.timeout_seconds

    def worked(self, subject: Subject, trial: "Trial") -> None:
        """Note that a subject did its part. For `Trial` alone."""
        record = self._records.get(subject)
        if record is None:
            if len(subject) > 1:
                return  # of pairs, only those that have failed are known
            record = self._records[subject] = _Record()
        now = self._clock.now()
        record.outcomes.append((now, True))
        if record.held and (record.probe is trial or trial.since >= record.until):
            del self._held[subject]
            record.held, record.probe, record.closed_at = False, None, now
            record.outcomes.clear()
            log.info("%s: works again, out of quarantine", _name(subject))

    def failed(self, subject: Subject, trial: "Trial") -> None:
        """Note that a subject failed to do its part. For `Trial` alone."""
        record = self._records.setdefault(subject, _Record())
        now = self._clock.now()
        record.outcomes.append((now, False))
        if record.held:
            if record.probe is trial and now >= record.until:
                self._hold(subject, record, now, "the request that tried it failed")
            return
        recent = [good for at, good in record.outcomes if now - at <= self.config.window_seconds]
        bad = recent.count(False)
        if self.config.failures and bad >= self.config.failures and 2 * bad >= len(recent):
            if now - record.closed_at > self.config.window_seconds + self.config.max_hold_seconds:
                record.trips = 0
            self._hold(subject, record, now, f"{bad} of its last {len(recent)} requests failed")

    def ended(self, subjects: Iterable[Subject], trial: "Trial") -> None:
        """Let others try what a request has told nothing of. For `Trial` alone."""
        for subject in subjects:
            record = self._held.get(subject)
            if record is not None and record.probe is trial:
                record.probe = None

    def _admits(self, subject: Subject) -> bool:
        record = self._held.get(subject)
        return record is None or (record.probe is None and self._clock.now() >= record.until)

    def _hold(self, subject: Subject, record: _Record, now: float, why: str) -> None:
        config = self.config
        doubled = config.hold_seconds * 2.0 ** min(record.trips, 32)
        seconds = min(doubled, config.max_hold_seconds)
        record.trips += 1
        record.held, record.until, record.probe = True, now + seconds, None
        self._held[subject] = record
        log.warning("%s: quarantined for %g s, %s", _name(subject), seconds, why)


class Trial:
    """What one planned request shows of its workers: told by its frontend, once each."""

    __slots__ = ("_decode", "_over", "_prefill", "_quarantine", "since")

    def __init__(
        self, quarantine: Quarantine, decode: Life, prefill: Life | None, since: float
    ) -> None:
        self.since = since
        """When it was planned, on the clock."""
        self._quarantine = quarantine
        self._decode = decode
        self._prefill = prefill
        self._over = False

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """All that it tries."""
        decode, prefill = self._decode, self._prefill
        if prefill is None:
            return ((decode,),)
        return ((decode,), (prefill,), (prefill, decode))

    def generating(self) -> None:
        """Note that the decode worker has generated a token, from the plan's prefill if any."""
        for subject in self.subjects:
            self._quarantine.worked(subject, self)

    def failed(self, leg: Leg, *, timed_out: bool) -> None:
        """Note that one part failed. Running out of time is no failure if it was short."""
        if self._over or (timed_out and not self._quarantine.is_long(self.since)):
            return
        self._over = True
        if leg is Leg.DECODE:
            self._quarantine.failed((self._decode,), self)
        elif self._prefill is not None:
            pair = leg is Leg.HANDOFF
            subject = (self._prefill, self._decode) if pair else (self._prefill,)
            self._quarantine.failed(subject, self)

    def ended(self) -> None:
        """Note that the request is over: no more will be told."""
        self._quarantine.ended(self.subjects, self)


def _kept(records: dict[Subject, _Record], lives: Container[Life]) -> dict[Subject, _Record]:
    return {s: record for s, record in records.items() if all(life in lives for life in s)}


def _name(subject: Subject) -> str:
    return " with ".join(life.worker_id for life in subject)
