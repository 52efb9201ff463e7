"""The KV pool as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvmesh.kv.base import PoolLayout

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token's KV is: `layers` times a key and a value of `kv_heads` times `head_dim`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Any

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.layers * 2 * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    def layout(self, megabytes: float, block_size: int) -> PoolLayout:
        """Return the pool that fits: at least one block."""
        block_bytes = self.token_bytes * block_size
        return PoolLayout(max(1, int(megabytes * _MIB) // block_bytes), block_bytes)


class KvMemory:
    """A pool's memory as the model sees it.

    `kv` is [blocks, layers, 2, block_size, kv_heads, head_dim], so that a block is one piece.
    On a CPU it is the host pool itself. On a GPU it lies there, and the host pool is where
    blocks wait to be pulled and arrive: `lend` and `adopt` copy.
    """

    def __init__(self, memory: memoryview, layout: PoolLayout, shape: KvShape, device: Any) -> None:
        words = torch.frombuffer(memory, dtype=torch.uint8).view(shape.dtype)
        host = words.view(layout.total_blocks, shape.layers, 2, -1, shape.kv_heads, shape.head_dim)
        self._host = None if device.type == "cpu" else host
        self.kv = host if device.type == "cpu" else torch.zeros_like(host, device=device)

    def lend(self, blocks: Sequence[int]) -> None:
        """Put blocks where peers can pull them."""
        if self._host is not None and blocks:
            index = torch.tensor(blocks)
            self._host[index] = self.kv[index.to(self.kv.device)].cpu()

    def adopt(self, blocks: Sequence[int]) -> None:
        """Take blocks over from where they were pulled to."""
        if self._host is not None and blocks:
            index = torch.tensor(blocks)
            self.kv[index.to(self.kv.device)] = self._host[index].to(self.kv.device)
