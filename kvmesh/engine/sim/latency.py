"""How long a simulated engine takes: a pure model, linear in what a step computes."""

from dataclasses import dataclass, field

_US = 1e-6


@dataclass(frozen=True, slots=True)
class Latency:
    """Costs of one engine step. A step computes prompt tokens and decodes a batch at once."""

    prefill_us_per_token: float = field(
        default=100.0, metadata={"help": "Microseconds per computed prompt token.", "min": 0}
    )
    decode_us_per_step: float = field(
        default=5750.0, metadata={"help": "Microseconds of a step that decodes.", "min": 0}
    )
    decode_us_per_sequence: float = field(
        default=20.0, metadata={"help": "More microseconds per sequence decoded.", "min": 0}
    )
    decode_us_per_kv_token: float = field(
        default=0.01, metadata={"help": "More microseconds per token of KV read.", "min": 0}
    )
    speed: float = field(
        default=1.0, metadata={"help": "Times faster than these; 0: no waiting at all.", "min": 0}
    )

    @property
    def waits(self) -> bool:
        """Whether steps take any time beyond their own computing."""
        costs = (
            self.prefill_us_per_token,
            self.decode_us_per_step,
            self.decode_us_per_sequence,
            self.decode_us_per_kv_token,
        )
        return self.speed > 0 and any(costs)

    def step_seconds(self, prefill_tokens: int, decodes: int, kv_tokens: int) -> float:
        """Return how long a step takes that computes this much."""
        if not self.speed:
            return 0.0
        micros = prefill_tokens * self.prefill_us_per_token
        if decodes:
            micros += self.decode_us_per_step
            micros += decodes * self.decode_us_per_sequence
            micros += kv_tokens * self.decode_us_per_kv_token
        return micros * _US / self.speed
