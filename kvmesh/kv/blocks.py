"""Names of KV blocks: one hash for a full block of tokens and all that came before it.

Equal hashes mean equal prefixes, across processes and engines, so they are the mesh's
currency for what is cached where. A partial last block has no name. Pure functions.
"""

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

HASH_SCHEME = "xxh3-64-v1"
"""Name of these hashes in the registry. Another way to compute them is another name."""

HASH_LABEL = "block_hash"
"""Label of a worker's registry entry with the name of the hashes that it tells of."""

_WORD = 4  # bytes of a token id


def seed(salt: str) -> int:
    """Return the parent of every first block under `salt` (the model's name)."""
    return xxh3_64_intdigest(salt.encode())


def chain(parent: int, tokens: Sequence[int] | bytes) -> int:
    """Return the hash of the block with `tokens` that follows `parent`.

    Bytes are the token ids as uint32, little endian. Raises `OverflowError` for an id
    that is no uint32.
    """
    block = tokens if isinstance(tokens, bytes) else pack(tokens)
    return xxh3_64_intdigest(parent.to_bytes(8, "little") + block)


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str) -> list[int]:
    """Return the chained hashes of all full blocks of `token_ids`, the first one first.

    There are `len(token_ids) // block_size` of them.
    """
    return block_hashes_from(seed(salt), token_ids, block_size)


def block_hashes_from(parent: int, token_ids: Sequence[int], block_size: int) -> list[int]:
    """Return the chained hashes of all full blocks of tokens that follow `parent`."""
    packed = pack(token_ids)
    width = block_size * _WORD
    digest = xxh3_64_intdigest
    hashes = []
    for start in range(0, len(packed) - width + 1, width):
        parent = digest(parent.to_bytes(8, "little") + packed[start : start + width])
        hashes.append(parent)
    return hashes


def pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids as the hash sees them: uint32, little endian."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
