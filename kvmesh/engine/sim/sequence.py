"""One request inside the simulated engine."""

from kvmesh.engine.base import EngineRequest, StepSink
from kvmesh.engine.sequence import BatchSequence, Kind, Limits
from kvmesh.types import KvTicket


class SimSequence(BatchSequence):
    """A `BatchSequence`, and where its next word of KV goes.

    `base` digests the first `folded` blocks, which are full. `start` is the byte where the
    current block begins; `slot` is the next word, `end` the first word behind the block: equal
    when they are to be found. `special`: picking a token takes more than the digest, and
    `steered`: a whole ranking, as the request biases it or allows few. `mix` is its random
    stream, `digest` that of all its tokens when prefill picked the last.
    """

    __slots__ = ("base", "digest", "end", "folded", "mix", "slot", "special", "start", "steered")

    def __init__(
        self,
        request: EngineRequest,
        kind: Kind,
        ticket: KvTicket | None,
        sink: StepSink,
        limits: Limits,
    ) -> None:
        super().__init__(request, kind, ticket, sink, limits)
        self.special = self.steered = False
        self.mix = 0
        self.folded = -1
        self.base = self.digest = 0
        self.start = self.slot = self.end = 0
