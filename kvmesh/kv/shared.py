"""A block pool in an anonymous memory file, readable by other processes of the host."""

import fcntl
import mmap
import os
import struct

from kvmesh.kv.base import PoolLayout
from kvmesh.kv.board import BOARD_BYTES

BOARD_AT = 4096
BLOCKS_AT = BOARD_AT + BOARD_BYTES

_MAGIC = b"KVMESH02"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedPool:
    """Zeroed memory for the blocks of one life, behind a first page that names it and a board.

    `memory` is the writable pool, `layout.size` bytes, block after block; `board` is for a
    `Board`. Views made from either must be released before `close`.
    """

    def __init__(self, layout: PoolLayout, epoch: str) -> None:
        self.layout = layout
        self.epoch = epoch
        self.fd = os.memfd_create("kvmesh-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, BLOCKS_AT + layout.size)
            os.pwrite(self.fd, header(epoch, layout), 0)
            # Readers rely on the size.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, BLOCKS_AT + layout.size)
        except BaseException:
            os.close(self.fd)
            raise
        self._whole = memoryview(self._map)
        self.board = self._whole[BOARD_AT:BLOCKS_AT]
        self.memory = self._whole[BLOCKS_AT:]

    def close(self) -> None:
        """Unmap and forget the memory. Once only."""
        self.memory.release()
        self.board.release()
        self._whole.release()
        self._map.close()
        os.close(self.fd)


def header(epoch: str, layout: PoolLayout) -> bytes:
    """Return how the first page of a pool of this life and layout begins."""
    name = epoch.encode()
    numbers = struct.pack("<QQI", layout.total_blocks, layout.block_bytes, len(name))
    return _MAGIC + numbers + name
