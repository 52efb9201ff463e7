"""Settings of the simulated engine."""

import hashlib
from dataclasses import dataclass, field

from kvmesh.engine.sequence import Limits
from kvmesh.engine.sim.faults import Faults
from kvmesh.engine.sim.latency import Latency
from kvmesh.engine.sim.model import WORD, SimModel, origin
from kvmesh.engine.stepper import HANDOFFS
from kvmesh.kv.base import PoolLayout
from kvmesh.kv.transports import BACKENDS

NAME = "sim"

_LAYOUT_REVISION = 1  # counts changes of what a token's KV is


@dataclass(frozen=True, slots=True)
class SimConfig:
    """How the simulated engine behaves. What is in one layout must be equal on all workers."""

    block_size: int = field(default=16, metadata={"help": "Tokens per KV block.", "min": 1})
    total_blocks: int = field(default=8192, metadata={"help": "KV blocks in the pool.", "min": 2})
    context_length: int = field(
        default=8192, metadata={"help": "Most tokens of prompt plus completion.", "min": 2}
    )
    vocab_size: int = field(default=49152, metadata={"help": "Token ids are below this.", "min": 2})
    sample_from: int = field(
        default=256, metadata={"help": "Least id sampled: special ids lie below it.", "min": 0}
    )
    eos_token_id: int = field(default=2, metadata={"help": "The id that ends a text.", "min": 0})
    eos_probability: float = field(
        default=0.0, metadata={"help": "Chance of EOS at each token.", "min": 0, "max": 1}
    )
    seed: int = field(default=0, metadata={"help": "Another seed is another model.", "min": 0})
    max_batch: int = field(default=256, metadata={"help": "Sequences run at once.", "min": 1})
    max_batch_tokens: int = field(
        default=8192, metadata={"help": "Tokens computed in one step.", "min": 1}
    )
    max_queue: int = field(
        default=1024, metadata={"help": "Requests waiting; over it they are refused.", "min": 0}
    )
    lease_seconds: float = field(
        default=30.0, metadata={"help": "Life of a KV ticket.", "min": 0.001}
    )
    handoff: str = field(
        default=HANDOFFS[0],
        metadata={
            "help": "When prefill gives the ticket out: with the KV, or before it is computed, so "
            "that decode waits with its blocks ready.",
            "choices": HANDOFFS,
        },
    )
    handoff_wait_seconds: float = field(
        default=300.0,
        metadata={"help": "Longest wait for KV that is still computed.", "min": 0.001},
    )
    pull_timeout_seconds: float = field(
        default=5.0, metadata={"help": "Longest pull of a ticket's blocks.", "min": 0.001}
    )
    kv_transport: str = field(
        default=BACKENDS[0],
        metadata={"help": "How KV blocks move between workers.", "choices": BACKENDS},
    )
    verify_content: bool = field(
        default=True,
        metadata={"help": "Refuse pulled KV that differs from what prefill had."},
    )
    latency: Latency = field(default_factory=Latency)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        """Refuse values that make no sense together."""
        if self.sample_from >= self.vocab_size:
            raise ValueError(
                f"sample_from {self.sample_from} is not below vocab_size {self.vocab_size}"
            )
        if self.eos_token_id >= self.vocab_size:
            raise ValueError(
                f"eos_token_id {self.eos_token_id} is not below vocab_size {self.vocab_size}"
            )

    @property
    def longest(self) -> int:
        """Most tokens that one sequence can have: the context, or all of the pool."""
        return min(self.context_length, self.block_size * self.total_blocks)

    @property
    def limits(self) -> Limits:
        """What bounds every sequence."""
        return Limits(
            vocab_size=self.vocab_size,
            longest=self.longest,
            eos_token_ids=frozenset((self.eos_token_id,)),
            choices=self.vocab_size - self.sample_from,
        )

    @property
    def pool_layout(self) -> PoolLayout:
        """The pool as memory."""
        return PoolLayout(self.total_blocks, self.block_size * WORD)

    def model(self, name: str) -> SimModel:
        """Return the model that is served as `name`."""
        return SimModel(
            origin=origin(name, self.seed),
            block_size=self.block_size,
            low=self.sample_from,
            high=self.vocab_size,
            eos_token_id=self.eos_token_id,
            eos_probability=self.eos_probability,
        )

    def layout_fingerprint(self, name: str) -> str:
        """Digest all that two workers must share for KV to move between them."""
        shared = (
            NAME,
            _LAYOUT_REVISION,
            name,
            self.seed,
            self.block_size,
            WORD,
            self.vocab_size,
            self.sample_from,
            self.kv_transport,
        )
        return hashlib.sha256(repr(shared).encode()).hexdigest()[:32]
