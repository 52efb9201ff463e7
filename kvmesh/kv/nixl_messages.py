"""What NIXL transports tell each other, as bytes: offers of a pool.

Pure functions. Little endian; the revision counts changes of any of it.
"""

import struct
from dataclasses import dataclass

from kvmesh.errors import TicketError
from kvmesh.kv.base import PoolLayout

PING = b"."
"""Says nothing: peers are more attentive after it."""

_MAGIC = b"KVNX"
_REVISION = 3
# magic, revision, kind, device, address, layout (2), board's address, number, bytes of the epoch
_OFFER = struct.Struct("<4sBBIQQQQQH")
_MAX_BLOCKS = (1 << 31) - 1  # NIXL counts descriptors in 32 bits
_KINDS = ("DRAM", "VRAM")


@dataclass(frozen=True, slots=True)
class Region:
    """A block pool as NIXL sees it: `kind` is DRAM or VRAM, `device` counts GPUs."""

    layout: PoolLayout
    address: int
    kind: str = _KINDS[0]
    device: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """Where the pool and the board of one life are, and how NIXL finds its agent."""

    epoch: str
    region: Region
    board: int
    metadata: bytes

    def offer(self, number: int) -> bytes:
        """Return what a peer needs to pull by the ticket of a number."""
        region, epoch = self.region, self.epoch.encode()
        head = _OFFER.pack(
            _MAGIC,
            _REVISION,
            _KINDS.index(region.kind),
            region.device,
            region.address,
            region.layout.total_blocks,
            region.layout.block_bytes,
            self.board,
            number,
            len(epoch),
        )
        return head + epoch + self.metadata


def parse_offer(offer: bytes) -> tuple[Site, int]:
    """Return what `Site.offer` was made of. Raises `TicketError` for anything else."""
    try:
        magic, revision, kind, device, address, blocks, size, board, number, length = (
            _OFFER.unpack_from(offer)
        )
        if (magic, revision) != (_MAGIC, _REVISION):
            raise TicketError("the ticket is not for this revision of the nixl transport")
        if blocks > _MAX_BLOCKS:
            raise TicketError("the ticket describes a pool larger than any")
        region = Region(PoolLayout(blocks, size), address, _KINDS[kind], device)
        at = _OFFER.size + length
        return Site(offer[_OFFER.size : at].decode(), region, board, offer[at:]), number
    except (struct.error, ValueError, IndexError) as error:
        raise TicketError("the ticket does not describe a pool of the nixl transport") from error
