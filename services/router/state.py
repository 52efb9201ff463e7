"""The workers as this router knows them: the registry's entries merged with their events.

Pure: no task, no clock. A worker gets requests only while the registry says `ready`
and its event stream stands, because a dead worker's stream breaks at once and its
registry entry vanishes seconds later.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum

from kvmesh.kv.blocks import HASH_LABEL, HASH_SCHEME
from kvmesh.types import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheSnapshot,
    Load,
    Member,
    Role,
    State,
    WorkerEvent,
    WorkerNews,
)
from services.router.index import PrefixIndex, Recent
from services.router.quarantine import Quarantine
from services.router.reservations import NOTHING_HELD, Ledger, Life
from services.router.speed import Speeds
from services.router.worker import REPORTS_TO_SETTLE, Expectation, Standing, WorkerState

log = logging.getLogger(__name__)

WORKER_ROLES = frozenset({Role.PREFILL, Role.DECODE})

CAPACITY_LABEL = "max_requests"
"""Label of a registry entry with the worker's own limit of requests."""

EVENTS_LABEL = "kv_events"
"""Label of a registry entry: `no` where the worker does not tell what it has cached."""

DEFAULT_MAX_CACHED_BLOCKS = 1 << 20
"""Hashes remembered of a worker that does not say how many blocks it has (~100 MB)."""


MEASURABLE_BYTES = 1 << 20
"""KV moved between two reports that tells how quickly it moves: of less, waiting is the most."""

NEWS = 0.25
"""How far one report moves that figure."""


class Applied(Enum):
    """What became of a message of a worker's event stream."""

    OK = "ok"
    GAP = "gap"
    STALE = "stale"


class Fleet:
    """Every worker that discovery lists, and what each told of itself."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        quarantine: Quarantine | None = None,
        max_cached_blocks: int = DEFAULT_MAX_CACHED_BLOCKS,
    ) -> None:
        self._ledger = ledger
        self._max_cached_blocks = max_cached_blocks
        self._workers: dict[str, WorkerState] = {}
        self._routable: dict[tuple[str, Role], tuple[WorkerState, ...]] = {}
        self._models: set[str] = set()
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self.speeds = Speeds()
        """How quickly workers compute prompts, from `computed`."""
        self._doubted: dict[Life, WorkerState] = {}
        self.quarantine = quarantine
        """Which workers are left alone for a while; None: nobody ever is."""
        self._token_bytes: dict[str, float] = {}
        self._byte_seconds: dict[str, float] = {}

    def update(self, members: Iterable[Member]) -> None:
        """Take over a membership snapshot.

        A worker with a new epoch starts from nothing, and what was reserved on its
        former life is forgotten. One that is no longer listed is forgotten but for its
        reservations: it may be finishing, and they end with their requests.
        """
        known = dict(self._workers)
        listed: dict[str, WorkerState] = {}
        for member in sorted(members, key=lambda m: m.id):
            if member.model:
                self._models.add(member.model)
            if member.role not in WORKER_ROLES:
                continue
            worker = known.get(member.id)
            if worker is None or not _same(worker.member, member):
                if worker is not None and worker.life.epoch != member.epoch:
                    self._ledger.forget(worker.life)
                _compare(member, (*listed.values(), *known.values()))
                worker = WorkerState(member, self._index_of(member))
            else:
                del known[member.id]
            worker.member = member
            worker.capacity = _capacity(member)
            worker.total_blocks = member.total_blocks
            worker.standing = None
            if member.labels.get(EVENTS_LABEL) != "no":
                worker.recent = None
            elif worker.recent is None:
                worker.recent = Recent(self._approximate_bound(member))
            listed[member.id] = worker
        for gone in known.values():
            self._forget_cache(gone)
            gone.index = None
        self._workers = listed
        self._doubted = {w.life: w for w in self._doubted.values() if self.find(w.life) is w}
        self._routable.clear()
        if self.quarantine is not None:
            self.quarantine.keep({worker.life for worker in listed.values()})
        self._indexes = {key: index for key, index in self._indexes.items() if not index.empty}

    def knows_model(self, model: str) -> bool:
        """Return whether any process has ever announced the model."""
        return model in self._models

    def workers(self) -> tuple[WorkerState, ...]:
        """Return all workers, by id."""
        return tuple(self._workers.values())

    def watchable(self) -> Mapping[Life, Member]:
        """Return the lives whose events are to be watched: those that are ready."""
        return {w.life: w.member for w in self._workers.values() if w.member.state is State.READY}

    def routable(self, model: str, role: Role) -> tuple[WorkerState, ...]:
        """Return the workers of a model that may be given requests now, by id."""
        pool = self._routable.get((model, role))
        if pool is None:
            pool = tuple(
                w
                for w in self._workers.values()
                if w.routable and w.member.role is role and w.member.model == model
            )
            if pool:
                self._routable[model, role] = pool
        return pool

    def standings(self, workers: Iterable[WorkerState]) -> list[Standing]:
        """Return what weighs on each of some listed workers now."""
        for life in self._ledger.changed():
            worker = self.find(life)
            if worker is not None:
                worker.standing = None
        held_on = self._ledger.lives_held.get
        return [w.standing or w.stand(held_on(w.life, NOTHING_HELD)) for w in workers]

    def index(self, model: str, block_size: int) -> PrefixIndex | None:
        """Return the caches of a model's workers of one block size; None if there are none."""
        return self._indexes.get((model, block_size))

    def indexes(self) -> tuple[PrefixIndex, ...]:
        """Return all indexes."""
        return tuple(self._indexes.values())

    def expect(
        self, worker: WorkerState, hashes: Sequence[int], block_size: int
    ) -> Expectation | None:
        """Count a planned prompt's blocks as the worker's; None where that can't be told."""
        index = worker.index
        if index is None or not hashes or block_size != worker.member.block_size:
            return None
        return Expectation(worker, index, hashes, self._bound(worker.member))

    def find(self, life: Life) -> WorkerState | None:
        """Return the worker if this life of it is the one listed now."""
        worker = self._workers.get(life.worker_id)
        return worker if worker is not None and worker.life == life else None

    def apply(self, life: Life, news: WorkerNews) -> Applied:
        """Take over one message of the event stream that was opened for a life.

        Sequence 1 is a snapshot: it voids what was known of the cache and makes the
        worker routable. GAP: messages are missing, nothing was taken over, and the
        caller has to subscribe anew. STALE: this life is not the one listed, or it was
        another that answered.
        """
        worker = self.find(life)
        if worker is None or (life.epoch and news.epoch != life.epoch):
            return Applied.STALE
        if news.sequence == 1:
            self._begin(worker, news.epoch)
        elif not worker.live or news.sequence != worker.sequence + 1:
            return Applied.GAP
        worker.sequence = news.sequence
        worker.standing = None
        for event in news.events:
            self._take(worker, event)
        worker.reports += 1
        worker.prefill_us = self.speeds.drifted(worker.pool, worker.prefill_us)
        worker.settle(worker.reports)
        if worker.index is not None:
            worker.index.sweep()
        return Applied.OK

    @property
    def doubted(self) -> Collection[WorkerState]:
        """The workers whose cache is not what they claim, by `doubt`."""
        return self._doubted.values()

    def doubt(self, life: Life, doubted: bool) -> None:
        """Note whether a worker's cache is thought to be what it claims."""
        worker = self.find(life)
        if worker is not None and doubted:
            self._doubted[life] = worker
        else:
            self._doubted.pop(life, None)

    def token_bytes(self, model: str) -> float:
        """Return how large a token's KV is, as tickets were reported; 0: none was yet."""
        return self._token_bytes.get(model, 0.0)

    def byte_seconds(self, model: str) -> float:
        """Return how long a byte of KV takes between workers, as these tell; 0: not known."""
        return self._byte_seconds.get(model, 0.0)

    def computed(self, life: Life, tokens: float, seconds: float) -> None:
        """Learn from how long a life had for a prompt and what was queued before it."""
        worker = self.find(life)
        if worker is not None:
            known = worker.prefill_us
            worker.prefill_us = self.speeds.learned(worker.pool, known, tokens, seconds)
            worker.standing = None

    def suspect(self, life: Life) -> None:
        """Take a worker out of routing until its next snapshot: its stream broke."""
        worker = self.find(life)
        if worker is not None and worker.live:
            worker.live = False
            worker.standing = None
            self._renew_cache(worker)
            self._routable.clear()

    def _begin(self, worker: WorkerState, epoch: str) -> None:
        if worker.epoch and worker.epoch != epoch:
            # A registry without epochs lists the next life under the same name.
            self._ledger.forget(worker.life)
        worker.epoch = epoch
        self._renew_cache(worker)
        if not worker.live:
            worker.live = True
            self._routable.clear()

    def _take(self, worker: WorkerState, event: WorkerEvent) -> None:
        match event:
            case Load():
                self._take_load(worker, event)
            case BlocksStored(hashes):
                self._remember(worker, hashes)
            case BlocksRemoved(hashes):
                if worker.index is not None:
                    worker.index.remove(worker.seat, hashes)
            case BlocksCleared():
                self._renew_cache(worker)
            case CacheSnapshot(hashes):
                self._renew_cache(worker)
                self._remember(worker, hashes)

    def _take_load(self, worker: WorkerState, load: Load) -> None:
        self._measure(worker.member.model, worker.load, load)
        worker.load = load
        reported = load.running + load.waiting
        worker.others = max(0, reported - self._ledger.held(worker.life).present)
        per_request = (load.used_blocks - load.ticket_blocks) / max(1, load.running)
        worker.other_blocks = worker.others * max(1.0, per_request)
        if load.ticket_blocks:
            tokens = load.ticket_blocks * worker.block_size
            self._token_bytes[worker.member.model] = load.ticket_bytes / tokens

    def _measure(self, model: str, before: Load, load: Load) -> None:
        """Learn how quickly KV moves, from pulls that are mostly moving."""
        moved = load.received_bytes - before.received_bytes
        seconds = load.received_seconds - before.received_seconds
        if moved >= MEASURABLE_BYTES and seconds > 0:
            known = self._byte_seconds.get(model)
            each = seconds / moved
            self._byte_seconds[model] = each if known is None else known + NEWS * (each - known)

    def _remember(self, worker: WorkerState, hashes: Sequence[int]) -> None:
        if worker.index is not None and worker.recent is None:
            worker.index.store(worker.seat, hashes, self._bound(worker.member))

    def _renew_cache(self, worker: WorkerState) -> None:
        """Start a worker's cache from nothing, on a seat of its own."""
        self._forget_cache(worker)
        if worker.index is not None:
            worker.seat = worker.index.open()
        if worker.recent is not None:
            worker.recent = Recent(self._approximate_bound(worker.member))

    def _forget_cache(self, worker: WorkerState) -> None:
        worker.settle(worker.reports + REPORTS_TO_SETTLE)
        if worker.index is not None:
            worker.index.close(worker.seat)

    def _index_of(self, member: Member) -> PrefixIndex | None:
        if member.block_size <= 0 or _scheme(member) != HASH_SCHEME:
            return None
        return self._indexes.setdefault((member.model, member.block_size), PrefixIndex())

    def _bound(self, member: Member) -> int:
        """Return how many hashes to remember: twice what fits, as stores may be told
        before the removals that made room for them.
        """
        return min(2 * member.total_blocks or self._max_cached_blocks, self._max_cached_blocks)

    def _approximate_bound(self, member: Member) -> int:
        return min(member.total_blocks or self._max_cached_blocks, self._max_cached_blocks)


def _scheme(member: Member) -> str:
    """Return the name of the hashes that a worker tells of; without a label, it is ours."""
    return member.labels.get(HASH_LABEL, HASH_SCHEME)


def _compare(member: Member, others: Sequence[WorkerState]) -> None:
    """Say in the log why a new worker's cache can't be told, or not for all prompts."""
    scheme = _scheme(member)
    if scheme != HASH_SCHEME:
        log.warning(
            "%s: names its KV blocks by %s, prompts are hashed by %s: its cache is not counted",
            member.id,
            scheme,
            HASH_SCHEME,
        )
    others = [w for w in others if w.member.model == member.model and w.id != member.id]
    sizes = {w.member.block_size for w in others}
    for size in sorted(sizes - {member.block_size}):
        log.warning(
            "%s: its KV blocks have %d tokens, those of other workers of the model %r have %d: "
            "prompts are hashed by one size, and the others' caches are not counted",
            member.id,
            member.block_size,
            member.model,
            size,
        )


def _capacity(member: Member) -> int:
    label = member.labels.get(CAPACITY_LABEL, "")
    return int(label) if label.isdecimal() else 0


def _same(known: Member, member: Member) -> bool:
    """Return whether what is known of a worker's cache is still good."""
    return (known.epoch, known.model, known.block_size) == (
        member.epoch,
        member.model,
        member.block_size,
    )
