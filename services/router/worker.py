"""One worker as the router knows it, and what is expected of its cache. Pure."""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from kvmesh.types import Load, Member, Role, State, Worker
from services.router.index import Claim, PrefixIndex, Recent
from services.router.reservations import Held, Life
from services.router.speed import Pool

FALLBACK_BLOCK_SIZE = 16
"""Tokens per block where nobody says: loads stay comparable within a fleet."""

DEFAULT_MAX_REQUESTS = 512
"""Requests on a worker that neither we nor it set a limit for."""

REPORTS_TO_SETTLE = 2
"""Reports after which what a prompt left in the cache was told: one may be under way."""


class Standing(NamedTuple):
    """What weighs on a worker at one instant, whatever the next request is. All >= 0.

    `load_blocks` is all its work in KV blocks, of so many `requests`; it takes less than
    `max_requests`. `queued_tokens` of prompts are to be computed. `decoding` requests hold
    `held_tokens` of KV. `free_tokens` fit into its cache without evicting any; infinite where
    it does not say how many do. `seat` -1: its cache can't be told. What formulas ask for is
    floats throughout: mixed with ints they take half as long again.
    """

    worker: "WorkerState"
    load_blocks: float
    requests: int
    max_requests: int
    seat: int
    block_size: int
    queued_tokens: float
    decoding: float
    held_tokens: float
    free_tokens: float
    prefill_us: float


class WorkerState:
    """One life of one worker. Changed by `Fleet` and `Expectation` only.

    `others` are requests on the worker that this router did not place, `other_blocks`
    the KV blocks they are thought to use: fixed at each report as what the worker
    counted beyond the reservations that had reached it by then. So our own requests
    count from the moment they are planned to the moment they end, and never twice.
    `capacity` is its own limit of requests, 0 where it has none.
    `epoch` is the member's or, where the registry does not know it, the worker's own word.
    `index` has its cached blocks under `seat`; None where it has no block size. `recent`
    stands in for the events of a worker that sends none. `prefill_us` is how long a prompt
    token takes to compute there, 0 while that is not known. `standing` is what all of this,
    its cache and what is reserved on it come to; None once any of it has changed.
    """

    __slots__ = (
        "block_size",
        "capacity",
        "epoch",
        "index",
        "life",
        "live",
        "load",
        "member",
        "other_blocks",
        "others",
        "prefill_us",
        "recent",
        "reports",
        "seat",
        "sequence",
        "settling",
        "standing",
        "total_blocks",
    )

    def __init__(self, member: Member, index: PrefixIndex | None) -> None:
        self.member = member
        self.capacity = 0
        self.block_size = member.block_size or FALLBACK_BLOCK_SIZE
        self.total_blocks = member.total_blocks
        self.life = Life(member.id, member.epoch)
        self.epoch = member.epoch
        self.live = False
        self.sequence = 0
        self.load = Load()
        self.others = 0
        self.other_blocks = 0.0
        self.prefill_us = 0.0
        self.index = index
        self.seat = -1 if index is None else index.open()
        self.recent: Recent | None = None
        self.reports = 0
        self.settling: deque[tuple[int, PrefixIndex, Claim]] = deque()
        self.standing: Standing | None = None

    @property
    def id(self) -> str:
        """Its id in the registry."""
        return self.member.id

    @property
    def pool(self) -> Pool:
        """The workers that can stand in for it."""
        return (self.member.model, self.member.role)

    @property
    def routable(self) -> bool:
        """Whether it may be given requests now."""
        return self.live and self.member.state is State.READY

    @property
    def cached(self) -> set[int]:
        """The blocks it has cached. Takes long: for tests and inspection."""
        return set() if self.index is None else self.index.hashes(self.seat)

    def cached_blocks(self) -> int:
        """Return how many blocks it has cached."""
        return 0 if self.index is None else self.index.counts[self.seat]

    def stand(self, held: Held) -> Standing:
        """Set and return its standing, with what is reserved on it."""
        size, total = self.block_size, self.total_blocks
        queued, holding = held.prefill_blocks, held.decode_blocks + self.other_blocks
        free = max(0, total - queued - self.cached_blocks()) * size if total else inf
        decoding = held.present + self.others if self.member.role is Role.DECODE else 0
        self.standing = standing = Standing(
            self,
            queued + holding,
            held.requests + self.others,
            self.capacity or DEFAULT_MAX_REQUESTS,
            self.seat,
            size,
            float(queued * size),
            float(decoding),
            float(holding * size),
            float(free),
            self.prefill_us,
        )
        return standing

    def settle(self, reports: int) -> None:
        """End the claims that are due by so many reports."""
        settling = self.settling
        while settling and settling[0][0] <= reports:
            _, index, claim = settling.popleft()
            index.settle(claim)

    def reference(self) -> Worker:
        """Return what a plan says of it."""
        return Worker(self.member.id, self.epoch, self.member.address)


class Expectation:
    """What a request will leave in a worker's cache, from its plan until that is told.

    Made by `Fleet.expect`. Exactly one of `computed` and `dropped` is to be called, once.
    """

    __slots__ = ("_bound", "_claim", "_hashes", "_index", "_worker")

    def __init__(
        self, worker: WorkerState, index: PrefixIndex, hashes: Sequence[int], bound: int
    ) -> None:
        self._worker = worker
        self._index = index
        self._hashes = hashes
        self._bound = bound
        self._claim = index.expect(worker.seat, hashes)

    def computed(self) -> None:
        """Note that the prompt is computed: the worker is about to tell what it cached."""
        worker, claim = self._worker, self._claim
        if worker.index is not self._index or worker.seat != claim.seat:
            self._index.settle(claim)
        elif worker.recent is not None:
            self._index.settle(claim)
            self._index.remove(claim.seat, worker.recent.use(self._hashes))
            self._index.store(claim.seat, self._hashes, self._bound)
            worker.standing = None
        else:
            due = worker.reports + REPORTS_TO_SETTLE
            worker.settling.append((due, self._index, claim))

    def dropped(self) -> None:
        """Note that the request was over before that."""
        self._index.settle(self._claim)
