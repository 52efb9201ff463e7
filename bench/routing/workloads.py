"""Workloads as programs make them: who sends what, and when."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.routing.request import BLOCK, Conversation, Request

Workload = Callable[[random.Random, int], list[Conversation]]
"""Makes conversations of so many requests in all, or a few more. They have no start yet."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload, and how many of its requests a second one worker takes without queueing."""

    make: Workload
    rate: float
    bursts: bool = False


def system_prompts(rng: random.Random, requests: int) -> list[Conversation]:
    """One question each, after one of a few dozen long system prompts."""
    prefixes = [_hashes(rng, 1530 // BLOCK) for _ in range(max(8, requests // 20))]
    made = []
    for _ in range(requests):
        prefix = rng.choice(prefixes)
        made.append(_single(rng, prefix, len(prefix) * BLOCK + rng.randint(40, 200), 32, 96))
    return made


def chats(rng: random.Random, requests: int) -> list[Conversation]:
    """Conversations of three to eight turns that people think about in between."""
    system = _hashes(rng, 512 // BLOCK)
    made, left = [], requests
    while left > 0:
        turns = rng.randint(3, 8)
        steps = [(rng.randint(30, 300), rng.randint(50, 200)) for _ in range(turns)]
        made.append(_growing(rng, system, steps, lambda: rng.expovariate(1 / 2.0)))
        left -= turns
    return made


def agents(rng: random.Random, requests: int) -> list[Conversation]:
    """Agents of one kind whose context grows by what their tools say, almost without a pause."""
    system = _hashes(rng, 2048 // BLOCK)
    made, left = [], requests
    while left > 0:
        turns = rng.randint(5, 15)
        steps = [(rng.randint(100, 1500), rng.randint(20, 80)) for _ in range(turns)]
        made.append(_growing(rng, system, steps, lambda: rng.uniform(0.05, 0.5)))
        left -= turns
    return made


def mixed_lengths(completion: int = 0) -> Workload:
    """Return short chat, and every tenth request a long document that nobody saw before.

    `completion` 0: answers of 64 to 256 tokens.
    """
    least, most = (completion, completion) if completion else (64, 256)

    def make(rng: random.Random, requests: int) -> list[Conversation]:
        system = _hashes(rng, 256 // BLOCK)
        made = []
        for _ in range(requests):
            if rng.random() < 0.1:
                made.append(_single(rng, [], rng.randint(4000, 16_000), least, most))
            else:
                prompt = len(system) * BLOCK + rng.randint(50, 500)
                made.append(_single(rng, system, prompt, least, most))
        return made

    return make


def fixed(prompt: int, completion: int) -> Workload:
    """Return a workload of requests that have nothing in common but their lengths."""

    def make(rng: random.Random, requests: int) -> list[Conversation]:
        return [_single(rng, [], prompt, completion, completion) for _ in range(requests)]

    return make


def repeated_prefixes(
    *, prefixes: int, prefix_tokens: int, reuse: int, own_tokens: int, completion: int
) -> Workload:
    """Return a workload of so many prefixes, each used as often as told, in random order."""

    def make(rng: random.Random, _: int) -> list[Conversation]:
        made = []
        for _ in range(prefixes):
            prefix = _hashes(rng, prefix_tokens // BLOCK)
            prompt = prefix_tokens + own_tokens
            made += [_single(rng, prefix, prompt, completion, completion) for _ in range(reuse)]
        rng.shuffle(made)
        return made

    return make


WORKLOADS: Mapping[str, Shape] = {
    "system": Shape(system_prompts, 5.0),
    "chat": Shape(chats, 4.0),
    "agents": Shape(agents, 3.0),
    "bursts": Shape(system_prompts, 4.0, bursts=True),
    "mixed": Shape(mixed_lengths(), 3.0),
}


def poisson(
    rng: random.Random, conversations: Sequence[Conversation], rate: float
) -> Sequence[Conversation]:
    """Let requests come at random, so many a second on average; return them.

    Later turns of a conversation come when they come; its first comes so much rarer.
    """
    requests = sum(len(each.turns) for each in conversations)
    pace, at = rate * len(conversations) / requests, 0.0
    for conversation in conversations:
        at += rng.expovariate(pace)
        conversation.start = at
    return conversations


def in_bursts(
    rng: random.Random, conversations: Sequence[Conversation], rate: float
) -> Sequence[Conversation]:
    """Let requests come in bursts: half of them in a tenth of the time."""
    poisson(rng, conversations, rate)
    for conversation in conversations:
        period, into = divmod(conversation.start, _PERIOD)
        share = into / _PERIOD
        share = share / 5 if share < 0.5 else 0.1 + (share - 0.5) * 1.8
        conversation.start = (period + share) * _PERIOD
    return conversations


_PERIOD = 10.0  # seconds from burst to burst


def _single(
    rng: random.Random, prefix: Sequence[int], prompt: int, least: int, most: int
) -> Conversation:
    completion = rng.randint(least, most)
    blocks = (prompt + completion) // BLOCK
    hashes = [*prefix, *_hashes(rng, blocks - len(prefix))]
    return Conversation([Request(hashes, prompt, completion, session=_name(rng))])


def _growing(
    rng: random.Random,
    system: Sequence[int],
    steps: Sequence[tuple[int, int]],
    pause: Callable[[], float],
) -> Conversation:
    """Return a conversation in which each step adds so many tokens and gets so many."""
    session, total = _name(rng), len(system) * BLOCK
    hashes = list(system)
    turns = []
    for new, completion in steps:
        prompt = total + new
        total = prompt + completion
        hashes += _hashes(rng, total // BLOCK - len(hashes))
        turns.append(Request(hashes[: total // BLOCK], prompt, completion, pause(), session))
    return Conversation(turns)


def _hashes(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def _name(rng: random.Random) -> str:
    return f"{rng.getrandbits(32):08x}"
