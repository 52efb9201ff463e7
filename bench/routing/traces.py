"""Traces in the format that Mooncake publishes: one JSON object a line.

    {"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]}

`timestamp` is in milliseconds. Each of `hash_ids` names a block of 512 prompt tokens with all
that comes before it, the last one a part of a block; equal ids are equal prefixes.
"""

import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from bench.routing.request import BLOCK, Conversation, Request
from kvmesh.kv.blocks import chain, seed

TRACE_BLOCK = 512
"""Tokens that a hash id of a trace stands for."""

_PARTS = TRACE_BLOCK // BLOCK


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> list[Conversation]:
    """Return the requests of a trace, at most `limit`, `speed` times as fast as they came.

    What was answered is not in a trace: it is new in each request. Raises `ValueError` with
    the number of a line that is not as it should be.
    """
    rng = random.Random(path.name)
    conversations = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, limit), 1):
            try:
                entry = json.loads(line)
                conversations.append(_conversation(entry, speed, rng))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not an entry of a trace: {error}") from error
    conversations.sort(key=lambda each: each.start)
    return conversations


def write_trace(path: Path, *, requests: int, rate: float, rng: random.Random) -> None:
    """Write a made-up trace: chats over a few system prompts, so many requests a second."""
    ids = iter(range(1, 1 << 60))
    systems = [[next(ids) for _ in range(rng.randint(1, 4))] for _ in range(4)]
    chats: list[tuple[list[int], int]] = []
    at, entries = 0.0, []
    for _ in range(requests):
        at += rng.expovariate(rate) * 1000
        if chats and rng.random() < 0.6:
            known, length = chats.pop(rng.randrange(len(chats)))
        else:
            known = rng.choice(systems)
            length = len(known) * TRACE_BLOCK
        length += rng.randint(20, 800)
        # A block that was only partly full has another name once there is more in it.
        full = known[: min(len(known), length // TRACE_BLOCK)]
        hash_ids = full + [next(ids) for _ in range(-(-length // TRACE_BLOCK) - len(full))]
        output = rng.randint(20, 200)
        entries.append(
            {
                "timestamp": int(at),
                "input_length": length,
                "output_length": output,
                "hash_ids": hash_ids,
            }
        )
        chats.append((hash_ids[: length // TRACE_BLOCK], length + output))
    path.write_text("".join(f"{line}\n" for line in _lines(entries)), encoding="utf-8")


def _conversation(entry: dict[str, Any], speed: float, rng: random.Random) -> Conversation:
    prompt, completion = int(entry["input_length"]), max(1, int(entry["output_length"]))
    hash_ids = entry["hash_ids"]
    if prompt < 1 or len(hash_ids) * TRACE_BLOCK < prompt:
        raise ValueError(f"{len(hash_ids)} hash ids for {prompt} tokens")
    hashes = []
    parent = seed("trace")
    for at in range(prompt // BLOCK):
        block, part = divmod(at, _PARTS)
        parent = chain(parent, int(hash_ids[block]).to_bytes(8, "little") + bytes([part]))
        hashes.append(parent)
    total = (prompt + completion) // BLOCK
    hashes += [rng.getrandbits(64) for _ in range(total - len(hashes))]
    return Conversation(
        [Request(hashes, prompt, completion)], float(entry["timestamp"]) / 1000 / speed
    )


def _lines(entries: Iterable[dict[str, Any]]) -> Iterable[str]:
    return (json.dumps(entry) for entry in entries)
