"""What placing a request on a worker costs, in seconds. Pure formulas, no state.

Two kinds of seconds are added up: those that the request itself waits for its first token,
and those by which it makes others wait. All figures are estimates for comparing workers
with each other: the constants need to be right in proportion only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MICRO = 1e-6
GIGA = 1e9

FULLER = 1e-4
"""Seconds that each answer on a worker is worth to one more: just enough to tell equals apart."""


@dataclass(frozen=True, slots=True)
class CostConfig:
    """What work costs on a worker of whom nothing better is known, and what counts how much."""

    prefill_us_per_token: float = field(
        default=100.0, metadata={"help": "microseconds to compute a prompt token", "min": 0.0}
    )
    decode_us_per_request: float = field(
        default=20.0,
        metadata={"help": "microseconds that a request adds to each decode step", "min": 0.0},
    )
    decode_us_per_token: float = field(
        default=0.01,
        metadata={"help": "microseconds that a token of KV adds to each decode step", "min": 0.0},
    )
    decode_step_ms: float = field(
        default=6.0,
        metadata={"help": "milliseconds of a decode step, however few decode", "min": 0.0},
    )
    work: float = field(
        default=0.5,
        metadata={"help": "weight of the time that a prefill takes from later ones", "min": 0.0},
    )
    interference: float = field(
        default=0.2,
        metadata={"help": "weight of the time that a prefill holds running decodes up", "min": 0.0},
    )
    stall: float = field(
        default=1.5,
        metadata={
            "help": "the same, where a prefill worker could spare it them and too many gaps"
            " between tokens are long already",
            "min": 0.0,
        },
    )
    pause_seconds: float = field(
        default=0.3,
        metadata={
            "help": "what a pause in a running answer counts for beyond its length, where a"
            " prefill worker could spare it and too many are long already",
            "min": 0.0,
        },
    )
    pause_share: float = field(
        default=0.009,
        metadata={
            "help": "share of the gaps between tokens that may be long, pulls of KV included:"
            " a little less than the 99th percentile leaves out",
            "min": 0.0,
        },
    )
    gather: float = field(
        default=0.03,
        metadata={
            "help": "how much longer than the mean a decode step may become by putting answers"
            " together, so that other workers can compute prompts",
            "min": 0.0,
        },
    )
    blocking: float = field(
        default=1.0,
        metadata={
            "help": "weight of the time that a prompt holds others up at a prefill worker: as"
            " many come after it as wait before it",
            "min": 0.0,
        },
    )
    eviction: float = field(
        default=0.5,
        metadata={"help": "chance that an evicted block is to be computed again", "min": 0.0},
    )
    transfer_ms: float = field(
        default=2.0, metadata={"help": "milliseconds of a KV hand-off of any size", "min": 0.0}
    )
    transfer_gb_per_second: float = field(
        default=1.0,
        metadata={"help": "gigabytes of KV moved per second, until workers tell", "min": 0.001},
    )
    kv_bytes_per_token: float = field(
        default=65536.0,
        metadata={"help": "bytes of a token's KV, until workers report some", "min": 0.0},
    )
    temperature: float = field(
        default=0.0,
        metadata={"help": "how much chance goes into a pick; 0: the cheapest worker", "min": 0.0},
    )


class Work(NamedTuple):
    """A request on one worker, and what that worker has to do besides. All >= 0.

    `uncached` prompt tokens are to be computed and `queued` ones before them, in
    `prefill_us` microseconds each. `decoding` requests hold `held_tokens` of KV there.
    `completion` tokens will be decoded. `evicted` cached tokens make room for the request.
    """

    uncached: float
    queued: float
    decoding: float
    held_tokens: float
    completion: float
    evicted: float
    prefill_us: float


def first_token_seconds(work: Work) -> float:
    """Return how long a prompt takes to be computed: (queued + uncached) x prefill time."""
    return (work.queued + work.uncached) * work.prefill_us * MICRO


def work_seconds(work: Work, costs: CostConfig) -> float:
    """Return how much a prefill costs those that come after it: weight x uncached x prefill time.

    Computing what is cached elsewhere is quicker than waiting there, at times, but it
    keeps a worker busy for nothing.
    """
    return costs.work * work.uncached * work.prefill_us * MICRO


def interference_seconds(work: Work, weight: float) -> float:
    """Return how much a prefill costs those that decode beside it.

    weight x decoding x uncached x prefill time: each of them waits once through it.
    """
    return weight * work.decoding * work.uncached * work.prefill_us * MICRO


def decode_seconds(work: Work, costs: CostConfig) -> float:
    """Return how much longer the completion takes for those who decode already.

    completion x (decoding x time per request + held tokens x time per token of KV).
    """
    step = work.decoding * costs.decode_us_per_request
    step += work.held_tokens * costs.decode_us_per_token
    return work.completion * step * MICRO


def eviction_seconds(work: Work, costs: CostConfig) -> float:
    """Return what is to be computed again later: chance x evicted x prefill time."""
    return costs.eviction * work.evicted * work.prefill_us * MICRO


def placement_seconds(works: Iterable[Work], costs: CostConfig) -> list[float]:
    """Return what a request costs on each of many workers that prefill and decode it.

    The sum of first token, work, interference, decode and eviction, in one pass: this is done
    for every worker and every request.
    """
    own, interference, eviction = 1 + costs.work, costs.interference, costs.eviction
    per_request, per_token = costs.decode_us_per_request, costs.decode_us_per_token
    return [
        MICRO
        * (
            (queued + uncached * (own + interference * decoding) + eviction * evicted) * prefill_us
            + completion * (decoding * per_request + held * per_token)
        )
        for uncached, queued, decoding, held, completion, evicted, prefill_us in works
    ]


def transfer_seconds(tokens: float, token_seconds: float, costs: CostConfig) -> float:
    """Return how long a prompt's KV takes from one worker to another.

    fixed part + tokens x seconds for each.
    """
    return costs.transfer_ms / 1000 + tokens * token_seconds


def beside_prompt(works: Iterable[Work], requests: Iterable[float], wait: float) -> list[float]:
    """Return how many answers would pause for a prompt on each of many decode workers.

    Those that decode there, and of the other `requests` there, whose prompts prefill workers
    compute within `wait` seconds, those that come before the prompt is done.
    """
    rate = MICRO / max(wait, MICRO)
    return [
        decoding
        + (placed - decoding)
        * (share if (share := (queued + uncached) * prefill_us * rate) < 1 else 1.0)
        for (uncached, queued, decoding, _, _, _, prefill_us), placed in zip(
            works, requests, strict=True
        )
    ]


def unnoticed_pauses(beside: Sequence[float], completion: float, share: float) -> list[bool]:
    """Return on which decode workers prompts may be computed while others decode there.

    Where that `share` of all gaps between tokens stays longer than a decode step. If prompts
    go to a worker and to all that are as free, each answer there came with a prompt for which
    those beside it paused; each answer elsewhere had one long gap while its KV was pulled:

    sum of beside^2 there + answers elsewhere <= share x completion x all answers.
    """
    elsewhere = sum(beside)
    limit, pauses = share * completion * elsewhere, 0.0
    unnoticed = [False] * len(beside)
    for at in sorted(range(len(beside)), key=beside.__getitem__):
        pauses += beside[at] ** 2
        elsewhere -= beside[at]
        unnoticed[at] = pauses + elsewhere <= limit
    return unnoticed


def local_prefill_seconds(
    works: Sequence[Work], requests: Iterable[float], wait: float, costs: CostConfig
) -> list[float]:
    """Return what computing a prompt on each of many decode workers costs.

    first token + beside x (pause + stall x uncached x prefill time). Between decode workers a
    prefill has to hold somebody up, but a prefill worker can spare it them all. A pause is
    noticed whatever its length, so much of it counts by number. Where pauses are unnoticed,
    they count as those that nobody can spare: interference x time. Where somebody decodes, the
    first token comes one and a half decode steps later: half of one is still to be computed,
    and another is computed with the prompt.
    """
    beside = beside_prompt(works, requests, wait)
    completion = works[0][4] if works else 0.0
    unnoticed = unnoticed_pauses(beside, completion, costs.pause_share)
    late = 1.5 * costs.decode_step_ms / 1000
    interference, pause, stall = costs.interference, costs.pause_seconds, costs.stall
    seconds = []
    for (uncached, queued, decoding, _, _, _, prefill_us), paused, free in zip(
        works, beside, unnoticed, strict=True
    ):
        own, before = uncached * prefill_us * MICRO, queued * prefill_us * MICRO
        each = interference * own if free else pause + stall * own
        seconds.append(before + own + (late if decoding else 0.0) + paused * each)
    return seconds


def remote_prefill_seconds(work: Work, waiting: float, costs: CostConfig) -> float:
    """Return what computing a prompt on a prefill worker costs, on which so many requests are.

    first token + blocking x waiting x uncached x prefill time: a long prompt in a long line
    makes many short ones late.
    """
    blocked = waiting * work.uncached * work.prefill_us * MICRO
    return first_token_seconds(work) + costs.blocking * blocked


def remote_decode_seconds(
    works: Sequence[Work], requests: Sequence[float], token_seconds: float, costs: CostConfig
) -> list[float]:
    """Return what decoding on each of many workers costs, of a prompt computed elsewhere.

    queued x prefill time + transfer of what is not cached + completion x (what its decode step
    takes beyond (1 + gather) x the mean of all) - a tenth of a millisecond for each of the
    `requests`: the KV waits for prompts that are computed there, and is decoded beside all that
    are placed there, those to come included. Up to that step, the fuller the better: others
    stay free to compute prompts.
    """
    base, per_request = costs.decode_step_ms / 1000, costs.decode_us_per_request * MICRO
    per_token = costs.decode_us_per_token * MICRO
    steps = [
        base + placed * per_request + held * per_token
        for (_, _, _, held, _, _, _), placed in zip(works, requests, strict=True)
    ]
    most = (1 + costs.gather) * sum(steps) / max(1, len(steps))
    return [
        queued * prefill_us * MICRO
        + uncached * token_seconds
        + (completion * (step - most) if step > most else 0.0)
        - placed * FULLER
        for (uncached, queued, _, _, completion, _, prefill_us), placed, step in zip(
            works, requests, steps, strict=True
        )
    ]
