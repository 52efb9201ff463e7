"""Names of blocks: the definition, spelled out, and what must not change."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvmesh.kv.blocks import block_hashes, block_hashes_from, chain, pack, seed

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def defined(token_ids: list[int], size: int, salt: str) -> list[int]:
    parent, hashes = xxh3_64_intdigest(salt.encode()), []
    for at in range(len(token_ids) // size):
        block = token_ids[at * size : (at + 1) * size]
        parent = xxh3_64_intdigest(struct.pack(f"<Q{size}I", parent, *block))
        hashes.append(parent)
    return hashes


@given(tokens, st.integers(1, 9), st.text(max_size=5))
def test_is_as_defined(token_ids: list[int], size: int, salt: str) -> None:
    assert block_hashes(token_ids, size, salt) == defined(token_ids, size, salt)


@given(tokens, st.integers(1, 9), st.integers(0, 40))
def test_goes_on_from_any_block(token_ids: list[int], size: int, split: int) -> None:
    whole = block_hashes(token_ids, size, "m")
    split = min(split, len(whole))
    parent = whole[split - 1] if split else seed("m")
    assert whole[split:] == block_hashes_from(parent, token_ids[split * size :], size)


@given(tokens, st.integers(0, 2**64 - 1))
def test_bytes_and_ids_are_one(token_ids: list[int], parent: int) -> None:
    assert chain(parent, token_ids) == chain(parent, pack(token_ids))


def test_values_are_wire_format() -> None:
    assert block_hashes(range(32), 16, "m") == [2178062460037640795, 15350928541568945588]


def test_partial_blocks_have_no_name() -> None:
    assert block_hashes([1] * 15, 16, "m") == []
    assert len(block_hashes([1] * 33, 16, "m")) == 2


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_that_are_no_uint32(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(0, [token])
