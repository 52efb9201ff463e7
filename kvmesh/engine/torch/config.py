"""Settings of the torch engine. Imports no torch."""

from dataclasses import dataclass, field

from kvmesh.engine.base import Seat
from kvmesh.engine.stepper import CONCURRENT, HANDOFFS, Traits
from kvmesh.kv.transports import BACKENDS

NAME = "torch"

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class TorchConfig:
    """How one torch engine runs. Zero leaves a choice to the model or the machine."""

    block_size: int = field(default=16, metadata={"help": "Tokens per KV block.", "min": 1})
    kv_cache_mb: float = field(
        default=1024.0,
        metadata={"help": "MiB of KV cache; memory is taken as it fills.", "min": 0.001},
    )
    workspace_mb: int = field(
        default=1024,
        metadata={
            "help": "MiB for a second copy of the KV of decoding requests, laid out so that a "
            "CPU reads it fast; 0: none. Memory is taken as it fills.",
            "min": 0,
        },
    )
    pack_weights: bool = field(
        default=True,
        metadata={
            "help": "Keep a second copy of float32 weights on a CPU, laid out for small batches; "
            "made when several requests first decode at once."
        },
    )
    context_length: int = field(
        default=0,
        metadata={"help": "Most tokens of prompt plus completion; 0: the model's own.", "min": 0},
    )
    max_batch: int = field(default=32, metadata={"help": "Sequences run at once.", "min": 1})
    max_batch_tokens: int = field(
        default=512,
        metadata={"help": "Tokens computed in one step; longer prompts take more.", "min": 1},
    )
    max_queue: int = field(
        default=1024, metadata={"help": "Requests waiting; over it they are refused.", "min": 0}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Of weights and KV; auto: float32 on a CPU, the model's own on a GPU.",
            "choices": DTYPES,
        },
    )
    device: str = field(
        default="auto",
        metadata={"help": "Where the model runs; auto: a GPU if there is one.", "choices": DEVICES},
    )
    threads: int = field(
        default=0, metadata={"help": "Threads of a CPU; 0: all cores allowed.", "min": 0}
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
        default="nixl",
        metadata={"help": "How KV blocks move between workers.", "choices": BACKENDS},
    )

    def traits(self, seat: Seat) -> Traits:
        """Return what the engine around the model needs to know."""
        return Traits(
            worker_id=seat.worker_id,
            epoch=seat.epoch,
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            lease_seconds=self.lease_seconds,
            pull_timeout_seconds=self.pull_timeout_seconds,
            concurrent=self.handoff == CONCURRENT,
            wait_seconds=self.handoff_wait_seconds,
        )
