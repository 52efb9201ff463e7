"""A simulated worker: the sim engine's latency and block pool, in steps of virtual time."""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.routing.feed import Publisher, Wire
from bench.routing.gaps import Durations
from bench.routing.request import BLOCK, Job, Ticket
from kvmesh.engine.sequence import Kind
from kvmesh.engine.sim.latency import Latency
from kvmesh.kv.pool import BlockPool
from kvmesh.types import Load, Member, Role, State

MODEL = "simulated"
EPOCH = "e1"
_MOMENT = 1e-9  # what rounding may make of two equal times


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a simulated worker can do. KV is pulled one prompt after the other."""

    latency: Latency = field(default_factory=Latency)
    blocks: int = 16_384
    max_batch: int = 256
    max_batch_tokens: int = 8192
    token_bytes: int = 65_536
    transfer_seconds: float = 0.002
    transfer_bytes_per_second: float = 10e9


class SimWorker:
    """Runs jobs in steps that decode all that run and prefill others beside them.

    A prompt's job reserves blocks for all its tokens when it is admitted, so nothing is
    preempted. `on_first` is called when a prompt is computed, `on_pulled` when a ticket's
    KV has arrived, `on_over` when the last token is there. Decoding without prompts takes
    one call until something changes, not one for each step.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        config: WorkerConfig,
        wire: Wire,
        gaps: Durations,
    ) -> None:
        self.name = name
        self.role = role
        self.config = config
        self.busy_seconds = 0.0
        self.on_first: Callable[[Job], None] = _ignore
        self.on_over: Callable[[Job], None] = _ignore
        self.on_pulled: Callable[[Ticket], None] = _ignore
        self.publisher = Publisher(name, EPOCH, self._load, self._snapshot, wire)
        self._loop = asyncio.get_running_loop()
        self._gaps = gaps
        self._pool = BlockPool(config.blocks, self.publisher.publish)
        self._waiting: deque[Job] = deque()
        self._prompts: list[Job] = []
        self._running: list[Job] = []
        self._ready: list[Job] = []
        self._begun = 0.0
        self._pulling = 0
        self._link_free_at = 0.0
        self._kv_tokens = 0
        self._ticket_blocks = 0
        self._received_bytes = 0
        self._received_seconds = 0.0
        self._stepping = False
        self._glide: _Glide | None = None

    def member(self) -> Member:
        """Return its entry in the registry."""
        return Member(
            id=self.name,
            role=self.role,
            epoch=EPOCH,
            address=self.name,
            state=State.READY,
            model=MODEL,
            block_size=BLOCK,
            total_blocks=self.config.blocks,
            layout_fingerprint="simulated",
        )

    def submit(self, job: Job) -> None:
        """Take a job in line. Raises `ValueError` for one that can never have its blocks."""
        if job.request.prompt + job.request.completion > self.config.blocks * BLOCK:
            raise ValueError(f"{job.request.prompt} tokens do not fit a worker's KV blocks")
        self._waiting.append(job)
        self._wake()

    def release(self, ticket: Ticket) -> None:
        """Free the blocks of a ticket."""
        self._ticket_blocks -= len(ticket.blocks)
        self._pool.release(ticket.blocks)
        self._wake()

    @property
    def held_blocks(self) -> int:
        """Blocks that any job or ticket holds."""
        return self._pool.used

    def _wake(self) -> None:
        """See to it that what is new takes part from the next step on."""
        if not self._stepping:
            self._step()
        elif self._glide is not None and self._glide.cut(self._loop.time()):
            self._land(self._glide)

    def _step(self) -> None:
        """Begin the next step, or rest if there is nothing to do."""
        ready, self._ready = self._ready, []
        for job in ready:
            self._run(job)
        self._admit()
        self._stepping = bool(self._prompts or self._running)
        self._begun = self._loop.time()
        if self._prompts:
            self._mixed_step()
        elif self._running:
            self._begin_glide()

    def _mixed_step(self) -> None:
        budget = max(1, self.config.max_batch_tokens - len(self._running))
        prefilled = 0
        for job in self._prompts:
            count = min(budget - prefilled, job.request.prompt - job.computed)
            job.computed += count
            prefilled += count
        latency, decoded = self.config.latency, len(self._running)
        seconds = latency.step_seconds(prefilled, decoded, self._kv_tokens)
        self._loop.call_later(seconds, self._mixed_step_over)

    def _mixed_step_over(self) -> None:
        self._decoded(1)
        prompts, self._prompts = self._prompts, []
        for job in prompts:
            if job.computed < job.request.prompt:
                self._prompts.append(job)
            else:
                self._prompt_computed(job)
        self._step()

    def _begin_glide(self) -> None:
        """Decode until the first of those running ends, unless it is cut short."""
        latency, jobs, tokens = self.config.latency, len(self._running), self._kv_tokens
        first = latency.step_seconds(0, jobs, tokens)
        more = latency.step_seconds(0, jobs, tokens + jobs) - first
        steps = min(job.request.completion - job.tokens for job in self._running)
        self._glide = _Glide(self._begun, first, more, steps)
        self._land(self._glide)

    def _land(self, glide: "_Glide") -> None:
        if glide.timer is not None:
            glide.timer.cancel()
        glide.timer = self._loop.call_at(glide.end, self._glide_over, glide)

    def _glide_over(self, glide: "_Glide") -> None:
        self._glide = None
        self._decoded(glide.steps)
        self._step()

    def _decoded(self, steps: int) -> None:
        """Give each that runs so many tokens more, the last of them now."""
        now, begun = self._loop.time(), self._begun
        self.busy_seconds += now - begun
        jobs = self._running
        if not jobs:
            return
        each, alike = (now - begun) / steps, steps * len(jobs)
        ended = []
        for job in jobs:
            request = job.request
            if job.last_token < begun:  # it was pulled since
                self._gaps.add(begun + each - job.last_token)
                alike -= 1
            request.gaps += now - job.last_token
            job.last_token = now
            job.tokens += steps
            if job.tokens >= request.completion:
                ended.append(job)
        self._gaps.add(each, alike)
        self._kv_tokens += steps * len(jobs)
        if ended:
            self._running = [job for job in jobs if job.tokens < job.request.completion]
            for job in ended:
                self._end(job)

    def _prompt_computed(self, job: Job) -> None:
        self._publish_prompt(job)
        job.tokens = 1
        job.last_token = self._loop.time()
        if job.kind is Kind.PREFILL:
            job.ticket = Ticket(self.name, job.blocks, job.last_token)
            self._ticket_blocks += len(job.blocks)
        self.on_first(job)
        if job.kind is not Kind.PREFILL:
            self._run(job)

    def _publish_prompt(self, job: Job) -> None:
        full = job.request.prompt // BLOCK
        job.blocks[:full] = self._pool.publish(job.blocks[:full], job.request.hashes[:full])

    def _run(self, job: Job) -> None:
        """Decode a job whose prompt is here."""
        self._kv_tokens += job.request.prompt + job.tokens
        if job.tokens < job.request.completion:
            self._running.append(job)
        else:
            self._end(job)

    def _end(self, job: Job) -> None:
        request = job.request
        self._kv_tokens -= request.prompt + job.tokens
        full = len(request.hashes)
        job.blocks[:full] = self._pool.publish(job.blocks[:full], request.hashes)
        self._pool.release(job.blocks)
        self.on_over(job)

    def _admit(self) -> None:
        while self._waiting and self._busy < self.config.max_batch:
            job = self._waiting[0]
            request, pulls = job.request, job.kind is Kind.RESUME
            usable = (request.prompt if pulls else request.prompt - 1) // BLOCK
            tokens = request.prompt + (0 if job.kind is Kind.PREFILL else request.completion)
            reserved = self._pool.reserve(request.hashes[:usable], -(-tokens // BLOCK))
            if reserved is None:
                return
            self._waiting.popleft()
            job.blocks = reserved.blocks
            job.computed = reserved.hits * BLOCK
            if pulls:
                self._pull(job)
            else:
                request.cached = job.computed
                self._prompts.append(job)

    def _pull(self, job: Job) -> None:
        config, now = self.config, self._loop.time()
        moved = (job.request.prompt - job.computed) * config.token_bytes
        begin = max(now, self._link_free_at)
        self._link_free_at = begin + moved / config.transfer_bytes_per_second
        self._pulling += 1
        end = self._link_free_at + config.transfer_seconds
        self._loop.call_at(end, self._pulled, job, moved, end - now)

    def _pulled(self, job: Job, moved: int, seconds: float) -> None:
        assert job.ticket is not None
        self._received_bytes += moved
        self._received_seconds += seconds
        self._pulling -= 1
        self._publish_prompt(job)
        job.tokens = 1
        job.last_token = job.ticket.first_token
        self._ready.append(job)
        self.on_pulled(job.ticket)
        self._wake()

    @property
    def _busy(self) -> int:
        return len(self._prompts) + len(self._running) + len(self._ready) + self._pulling

    def _load(self) -> Load:
        return Load(
            running=self._busy,
            waiting=len(self._waiting),
            used_blocks=self._pool.used,
            total_blocks=self._pool.total_blocks,
            ticket_blocks=self._ticket_blocks,
            ticket_bytes=self._ticket_blocks * BLOCK * self.config.token_bytes,
            received_bytes=self._received_bytes,
            received_seconds=self._received_seconds,
        )

    def _snapshot(self) -> list[int]:
        return self._pool.snapshot()


class _Glide:
    """So many steps of decoding, the first of `first` seconds, each of `more` seconds more."""

    def __init__(self, begin: float, first: float, more: float, steps: int) -> None:
        self.steps = steps
        self.timer: asyncio.TimerHandle | None = None
        self._begin = begin
        self._first = first
        self._more = more

    @property
    def end(self) -> float:
        """When the last step is over."""
        return self._begin + self._span(self.steps)

    def cut(self, now: float) -> bool:
        """End with the step that is being computed now; return whether that is earlier."""
        since = now - self._begin - _MOMENT
        steps = 1 + bisect_left(range(1, self.steps), since, key=self._span)
        earlier = steps < self.steps
        self.steps = steps
        return earlier

    def _span(self, steps: int) -> float:
        return steps * self._first + self._more * steps * (steps - 1) / 2


def _ignore(_: object) -> None:
    pass
