"""The workers as this router knows them: the registry's entries merged with their events.

Pure: no task, no clock. A worker gets requests only while the registry says `ready`
and its event stream stands, because a dead worker's stream breaks at once and its
registry entry vanishes seconds later.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from kvmesh.types import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheSnapshot,
    Load,
    Member,
    Role,
    State,
    Worker,
    WorkerEvent,
    WorkerNews,
)
from services.router.reservations import Ledger, Life

WORKER_ROLES = frozenset({Role.PREFILL, Role.DECODE})

CAPACITY_LABEL = "max_requests"
"""Label of a registry entry with the worker's own limit of requests."""

DEFAULT_MAX_CACHED_BLOCKS = 1 << 20
"""Hashes remembered of a worker that does not say how many blocks it has (~100 MB)."""


class Applied(Enum):
    """What became of a message of a worker's event stream."""

    OK = "ok"
    GAP = "gap"
    STALE = "stale"


class WorkerState:
    """One life of one worker. Changed by `Fleet` only.

    `others` are requests on the worker that this router did not place, `other_blocks`
    the KV blocks they are thought to use: fixed at each report as what the worker
    counted beyond the reservations that had reached it by then. So our own requests
    count from the moment they are planned to the moment they end, and never twice.
    `capacity` is its own limit of requests, 0 where it has none.
    `epoch` is the member's or, where the registry does not know it, the worker's own word.
    """

    __slots__ = (
        "cached",
        "capacity",
        "epoch",
        "life",
        "live",
        "load",
        "member",
        "other_blocks",
        "others",
        "sequence",
    )

    def __init__(self, member: Member) -> None:
        self.member = member
        self.capacity = 0
        self.life = Life(member.id, member.epoch)
        self.epoch = member.epoch
        self.live = False
        self.sequence = 0
        self.load = Load()
        self.others = 0
        self.other_blocks = 0.0
        self.cached: set[int] = set()

    @property
    def id(self) -> str:
        """Its id in the registry."""
        return self.member.id

    @property
    def routable(self) -> bool:
        """Whether it may be given requests now."""
        return self.live and self.member.state is State.READY

    def reference(self) -> Worker:
        """Return what a plan says of it."""
        return Worker(self.member.id, self.epoch, self.member.address)

    def cached_tokens(
        self, block_hashes: Sequence[int], block_size: int, prompt_tokens: int
    ) -> int:
        """Return how many leading prompt tokens it is thought to have cached.

        Whole blocks, and never the whole prompt: engines compute at least its last
        token anew. 0 where the hashes are of another block size than the worker's.
        """
        if not self.cached or block_size <= 0 or block_size != self.member.block_size:
            return 0
        usable = max(0, prompt_tokens - 1) // block_size
        blocks = 0
        for block_hash in block_hashes[:usable]:
            if block_hash not in self.cached:
                break
            blocks += 1
        return blocks * block_size


class Fleet:
    """Every worker that discovery lists, and what each told of itself."""

    def __init__(
        self, ledger: Ledger, *, max_cached_blocks: int = DEFAULT_MAX_CACHED_BLOCKS
    ) -> None:
        self._ledger = ledger
        self._max_cached_blocks = max_cached_blocks
        self._workers: dict[str, WorkerState] = {}
        self._routable: dict[tuple[str, Role], tuple[WorkerState, ...]] = {}
        self._models: set[str] = set()

    def update(self, members: Iterable[Member]) -> None:
        """Take over a membership snapshot.

        A worker with a new epoch starts from nothing, and what was reserved on its
        former life is forgotten. One that is no longer listed is forgotten but for its
        reservations: it may be finishing, and they end with their requests.
        """
        known = self._workers
        listed: dict[str, WorkerState] = {}
        for member in sorted(members, key=lambda m: m.id):
            if member.model:
                self._models.add(member.model)
            if member.role not in WORKER_ROLES:
                continue
            worker = known.get(member.id)
            if worker is None or worker.life.epoch != member.epoch:
                if worker is not None:
                    self._ledger.forget(worker.life)
                worker = WorkerState(member)
            worker.member = member
            worker.capacity = _capacity(member)
            listed[member.id] = worker
        self._workers = listed
        self._routable.clear()

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
        for event in news.events:
            self._take(worker, event)
        return Applied.OK

    def suspect(self, life: Life) -> None:
        """Take a worker out of routing until its next snapshot: its stream broke."""
        worker = self.find(life)
        if worker is not None and worker.live:
            worker.live = False
            worker.cached.clear()
            self._routable.clear()

    def _begin(self, worker: WorkerState, epoch: str) -> None:
        if worker.epoch and worker.epoch != epoch:
            # A registry without epochs lists the next life under the same name.
            self._ledger.forget(worker.life)
        worker.epoch = epoch
        worker.cached.clear()
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
                worker.cached.difference_update(hashes)
            case BlocksCleared():
                worker.cached.clear()
            case CacheSnapshot(hashes):
                worker.cached.clear()
                self._remember(worker, hashes)

    def _take_load(self, worker: WorkerState, load: Load) -> None:
        worker.load = load
        reported = load.running + load.waiting
        worker.others = max(0, reported - self._ledger.held(worker.life).present)
        per_request = (load.used_blocks - load.ticket_blocks) / max(1, load.running)
        worker.other_blocks = worker.others * max(1.0, per_request)

    def _remember(self, worker: WorkerState, hashes: Sequence[int]) -> None:
        room = max(0, self._bound(worker.member) - len(worker.cached))
        worker.cached.update(hashes if len(hashes) <= room else hashes[:room])

    def _bound(self, member: Member) -> int:
        """Return how many hashes to remember: twice what fits, as stores may be told
        before the removals that made room for them.
        """
        return min(2 * member.total_blocks or self._max_cached_blocks, self._max_cached_blocks)


def _capacity(member: Member) -> int:
    label = member.labels.get(CAPACITY_LABEL, "")
    return int(label) if label.isdecimal() else 0
