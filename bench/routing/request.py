"""What simulated clients send, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.engine.sequence import Kind

BLOCK = 64
"""Tokens in a KV block of all simulated workers."""


@dataclass(eq=False, slots=True)
class Request:
    """One request. Times are seconds of virtual time; 0 until known.

    `hashes` are those of the full blocks of prompt and completion together. `pause` is how
    long its client waits after the answer to the request before. `gaps` are the seconds
    between its tokens, all together.
    """

    hashes: Sequence[int]
    prompt: int
    completion: int
    pause: float = 0.0
    session: str = ""
    arrived: float = 0.0
    cached: int = 0
    decode: str = ""
    prefill: str = ""
    refused: bool = False
    ttft: float = 0.0
    gaps: float = 0.0

    @property
    def prompt_hashes(self) -> Sequence[int]:
        """The hashes of the prompt's full blocks."""
        return self.hashes[: self.prompt // BLOCK]

    @property
    def token_seconds(self) -> float:
        """The mean gap between its tokens."""
        return self.gaps / max(1, self.completion - 1)


@dataclass(eq=False, slots=True)
class Conversation:
    """Requests that follow each other: each is sent when the one before has been answered.

    `start` counts in an open loop only, in seconds.
    """

    turns: Sequence[Request]
    start: float = 0.0


@dataclass(eq=False, slots=True)
class Job:
    """A request at one worker: computed there, prefilled only, or decoded after a pull."""

    request: Request
    kind: Kind
    ticket: "Ticket | None" = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    tokens: int = 0
    last_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """The KV of a prompt that waits at a prefill worker; `first_token` is when it was done."""

    holder: str
    blocks: Sequence[int]
    first_token: float
