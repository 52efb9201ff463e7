"""vLLM's KV events, told in the mesh's hashes."""

from typing import Any

import pytest

from kvmesh.engine.vllm.events import BlockMirror
from kvmesh.kv.blocks import block_hashes
from kvmesh.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

SIZE = 4
TOKENS = list(range(100, 116))
OURS = block_hashes(TOKENS, SIZE, "model")


def stored(names: list[int], parent: int | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "group_idx": 0,
        **more,
    }


def removed(*names: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names)}


@pytest.fixture
def mirror() -> BlockMirror:
    return BlockMirror(SIZE, "model")


@pytest.fixture
def seen(mirror: BlockMirror) -> list[KvEvent]:
    events: list[KvEvent] = []
    mirror.subscribe(events.append)
    return events


def test_blocks_get_the_meshs_names(mirror: BlockMirror, seen: list[KvEvent]) -> None:
    mirror.apply([stored([1, 2], None, TOKENS[:8]), stored([3, 4], 2, TOKENS[8:])])
    assert seen == [BlocksStored(OURS[:2]), BlocksStored(OURS[2:])]
    assert mirror.snapshot() == OURS


def test_a_block_stored_twice_is_told_once(mirror: BlockMirror, seen: list[KvEvent]) -> None:
    mirror.apply([stored([1], None, TOKENS[:4]), stored([1, 2], None, TOKENS[:8])])
    assert seen == [BlocksStored(OURS[:1]), BlocksStored(OURS[1:2])]


def test_removal_is_told_by_our_name_and_once(mirror: BlockMirror, seen: list[KvEvent]) -> None:
    mirror.apply([stored([1, 2], None, TOKENS[:8]), removed(2, 99), removed(2)])
    assert seen[1:] == [BlocksRemoved(OURS[1:2])]
    assert mirror.snapshot() == OURS[:1]


def test_clearing_forgets_all_and_is_silent_when_empty(
    mirror: BlockMirror, seen: list[KvEvent]
) -> None:
    mirror.apply([{"type": "AllBlocksCleared"}])
    mirror.apply([stored([1], None, TOKENS[:4]), {"type": "AllBlocksCleared"}])
    mirror.apply([stored([2], 1, TOKENS[4:8])])  # its parent is no longer known
    assert seen == [BlocksStored(OURS[:1]), BlocksCleared()]
    assert mirror.snapshot() == []


@pytest.mark.parametrize(
    "foreign",
    [
        {"lora_id": 1},
        {"extra_keys": [("salt",)]},
        {"block_size": 2 * SIZE},
        {"group_idx": 1},
        {"parent_block_hash": 77},
    ],
    ids=str,
)
def test_blocks_the_mesh_can_not_name_are_left_out(
    mirror: BlockMirror, seen: list[KvEvent], foreign: dict[str, Any]
) -> None:
    mirror.apply([stored([1], None, TOKENS[:4], **foreign), {"type": "SomethingNew"}])
    assert seen == []


def test_the_snapshot_has_parents_first_even_if_they_came_back_later(mirror: BlockMirror) -> None:
    mirror.apply([stored([1, 2, 3], None, TOKENS[:12]), removed(1)])
    assert mirror.snapshot() == OURS[1:3]
    mirror.apply([stored([1], None, TOKENS[:4])])
    assert mirror.snapshot() == OURS[:3]


def test_unsubscribing_ends_it(mirror: BlockMirror) -> None:
    events: list[KvEvent] = []
    end = mirror.subscribe(events.append)
    end()
    end()
    mirror.apply([stored([1], None, TOKENS[:4])])
    assert events == []
