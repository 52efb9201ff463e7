"""What differs from one `BatchEngine` to another: what computes its steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.engine.base import EngineInfo, EngineRequest, Finish, StepSink
from kvmesh.engine.batch import Batch, S
from kvmesh.engine.handoff import Offer
from kvmesh.engine.sequence import Kind
from kvmesh.kv.base import KvTransport, OnPulled
from kvmesh.types import KvTicket

CONCURRENT = "concurrent"
HANDOFFS = ("sequential", CONCURRENT)


@dataclass(frozen=True, slots=True)
class Traits:
    """What bounds an engine, and what its tickets say of it.

    `concurrent`: prompts handed over get their tickets before they are computed, for
    `wait_seconds` at most. `lose_leases` is a fault to inject: a ticket's blocks are freed
    at once.
    """

    worker_id: str
    epoch: str
    max_batch: int
    max_queue: int
    lease_seconds: float
    pull_timeout_seconds: float
    concurrent: bool = False
    wait_seconds: float = 300.0
    lose_leases: bool = False


class Stepper(Protocol[S]):
    """Computes the steps of a `BatchEngine`, in memory of its own.

    Called in the event loop, in this order: `load`, `open`, any of the others, `close`.
    `close` and then `aclose` are called however far it got.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, once loaded."""
        ...

    async def load(self) -> EngineInfo:
        """Get everything but the pool ready. Raises `EngineError`."""
        ...

    def open(self, on_pulled: OnPulled) -> KvTransport:
        """Make the pool and the transport over it, which the caller closes after `close`."""
        ...

    def sequence(
        self, request: EngineRequest, kind: Kind, ticket: KvTicket | None, sink: StepSink
    ) -> S:
        """Return a valid sequence for a request. Raises what `AsyncEngine.generate` may."""
        ...

    def digest(self, sequence: S) -> int:
        """Return what a ticket's KV is recognized by, below 2**64; 0: not known yet."""
        ...

    def check(self, sequence: S, offer: Offer) -> None:
        """Raise `TicketError` where a ticket is seen to be for something else."""
        ...

    def adopt(self, sequence: S, offer: Offer, blocks: Sequence[int]) -> None:
        """Take over blocks that were pulled. Raises `TransferError` if they are wrong."""
        ...

    def lend(self, blocks: Sequence[int]) -> None:
        """Make blocks ready to be pulled by others."""
        ...

    async def step(self, batch: Batch[S]) -> Iterable[tuple[S, int, Finish | None]]:
        """Compute one step of a batch that has something to compute.

        Returns the token of each sequence that got one, and how it ended if it did; such
        a sequence holds nothing any more. Its `logprob` is the token's, if it asks for it, and
        its `scores` are complete with its first one.
        Sequences may be removed meanwhile, and pulled ones may join. Cancelled, it returns
        when nothing is computed any more.
        """
        ...

    def close(self) -> None:
        """Let go of the pool. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Let go of everything else. Idempotent."""
        ...
