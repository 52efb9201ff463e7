"""The simulated model: the next token is a function of the bytes in the KV blocks.

Each token's KV is one 8-byte word: its id and position, mixed with the digest of all full
blocks before its own. The digest of a sequence folds xxh3-64 over its blocks' bytes, and
picks the next token. So one wrong or stale block changes every token after it, and
right answers need the right bytes, wherever they were computed.

Pure functions, and memory given as an argument. Little-endian machines only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kvmesh.kv.blocks import pack

WORD = 8  # bytes of KV per token

_PROBABILITY_BITS = 24
_SALT_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model: ids are picked from `low` up to, without, `high`, and EOS now and then.

    `origin` is the digest of nothing: two models differ by it.
    """

    origin: int
    block_size: int
    low: int
    high: int
    eos_token_id: int
    eos_probability: float = 0.0

    def pick(self, digest: int, salt: int = 0, banned: frozenset[int] = frozenset()) -> int:
        """Return the next token of a sequence with this digest, none of `banned`.

        `salt` stands for the random stream: 0 is greedy. `banned` must leave a choice.
        """
        value = self.mix(digest, salt)
        if self.eos_token_id not in banned and self.draws_eos(value):
            return self.eos_token_id
        token = self.low + value % (self.high - self.low)
        while token in banned:
            token = token + 1 if token + 1 < self.high else self.low
        return token

    def mix(self, digest: int, salt: int) -> int:
        """Return the number below 2**64 that decides in a random stream."""
        return digest ^ (salt * _SALT_FACTOR & _MASK)

    def draws_eos(self, value: int) -> bool:
        """Return whether such a number stands for the end of the text."""
        if not self.eos_probability:
            return False
        draw = value >> 64 - _PROBABILITY_BITS
        return draw < self.eos_probability * (1 << _PROBABILITY_BITS)


def origin(name: str, seed: int) -> int:
    """Return the digest of nothing for a model of this name and seed."""
    return xxh3_64_intdigest(name.encode(), seed)


def expected(
    model: SimModel,
    prompt_ids: Sequence[int],
    count: int,
    *,
    salt: int = 0,
    banned: frozenset[int] = frozenset(),
) -> list[int]:
    """Return the right `count` tokens after a prompt, without any engine.

    This is the definition, one token after another; what ends a request is not its matter.
    """
    base = digest = model.origin
    block = b""
    tokens = list(prompt_ids)
    for position in range(len(prompt_ids) + count - 1):
        word = base ^ (tokens[position] << 32 | position)
        block += word.to_bytes(WORD, "little")
        digest = xxh3_64_intdigest(block, base)
        if len(block) == model.block_size * WORD:
            base, block = digest, b""
        if position >= len(prompt_ids) - 1:
            tokens.append(model.pick(digest, salt, banned))
    return tokens[len(prompt_ids) :]


class KvMemory:
    """The pool's memory, as the model reads and writes it.

    `raw` is its bytes, `words` the same as one integer per token. `close` releases both,
    as the memory's owner needs before unmapping it.
    """

    def __init__(self, memory: memoryview, block_size: int) -> None:
        self.raw = memory[:]
        self.words = memory.cast("Q")
        self.block_size = block_size
        self.block_bytes = block_size * WORD
        # A multiple of this has the same 64 bits in each word of a block.
        self._repeat = int.from_bytes(b"\1\0\0\0\0\0\0\0" * block_size, "little")

    def fold(self, base: int, blocks: Sequence[int]) -> int:
        """Return the digest of `base` and then full blocks, from their bytes."""
        raw, width = self.raw, self.block_bytes
        for block in blocks:
            base = xxh3_64_intdigest(raw[block * width : (block + 1) * width], base)
        return base

    def fold_part(self, base: int, block: int, tokens: int) -> int:
        """Return the digest of `base` and then the first `tokens` of a block."""
        at = block * self.block_bytes
        return xxh3_64_intdigest(self.raw[at : at + tokens * WORD], base)

    def write(self, base: int, lanes: bytes, block: int, offset: int) -> int:
        """Write tokens (as `lanes` of one block) from `offset` on; return the digest then."""
        at = block * self.block_bytes
        start, stop = at + offset * WORD, at + offset * WORD + len(lanes)
        mixed = int.from_bytes(lanes, "little") ^ (base * self._repeat)
        mixed &= (1 << len(lanes) * 8) - 1
        self.raw[start:stop] = mixed.to_bytes(len(lanes), "little")
        return xxh3_64_intdigest(self.raw[at:stop], base)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with other bytes, as a stale or half-written block has."""
        for block in blocks:
            at = block * self.block_bytes
            for byte in range(at, at + self.block_bytes):
                self.raw[byte] ^= 0xA5

    def close(self) -> None:
        """Release the views. Idempotent."""
        self.raw.release()
        self.words.release()


def lanes(token_ids: Sequence[int], first_position: int) -> bytes:
    """Return what a token and its position give to its word, for each token in order."""
    pairs = np.empty((len(token_ids), 2), np.uint32)
    pairs[:, 0] = np.arange(first_position, first_position + len(token_ids), dtype=np.uint32)
    pairs[:, 1] = np.frombuffer(pack(token_ids), np.uint32)
    return pairs.tobytes()
