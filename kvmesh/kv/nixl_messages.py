"""What NIXL transports tell each other, as bytes: where a pool is, questions and answers.

Pure functions. Little endian; the revision counts changes of any of it.
"""

import struct
from dataclasses import dataclass

from kvmesh.errors import TicketError
from kvmesh.kv.base import PoolLayout

PING = b"."
"""Says nothing. Sending it fails when the peer is gone."""

_MAGIC = b"KVNX"
_REVISION = 1
_SITE = struct.Struct("<4sBBIQQQH")  # magic, revision, kind, device, address, layout, epoch
_ASK = struct.Struct("<cQHH")  # kind, number, bytes of the holder's epoch and of the ticket's id
_ANSWER = struct.Struct("<cQ")  # kind, number
_MAX_BLOCKS = (1 << 31) - 1  # NIXL counts descriptors in 32 bits
_KINDS = ("DRAM", "VRAM")
_ASKED, _YES, _NO = b"?", b"+", b"-"


@dataclass(frozen=True, slots=True)
class Region:
    """A block pool as NIXL sees it: `kind` is DRAM or VRAM, `device` counts GPUs."""

    layout: PoolLayout
    address: int
    kind: str = _KINDS[0]
    device: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """Where the pool of one life is, and the metadata by which NIXL finds its agent."""

    epoch: str
    region: Region
    metadata: bytes

    def pack(self) -> bytes:
        """Return it as `KvTransport.describe` does."""
        region, epoch = self.region, self.epoch.encode()
        head = _SITE.pack(
            _MAGIC,
            _REVISION,
            _KINDS.index(region.kind),
            region.device,
            region.address,
            region.layout.total_blocks,
            region.layout.block_bytes,
            len(epoch),
        )
        return head + epoch + self.metadata


def parse_site(description: bytes) -> Site:
    """Return what `Site.pack` made. Raises `TicketError` for anything else."""
    try:
        magic, revision, kind, device, address, blocks, size, length = _SITE.unpack_from(
            description
        )
        if (magic, revision) != (_MAGIC, _REVISION):
            raise TicketError("the ticket is not for this revision of the nixl transport")
        if blocks > _MAX_BLOCKS:
            raise TicketError("the ticket describes a pool larger than any")
        region = Region(PoolLayout(blocks, size), address, _KINDS[kind], device)
        at = _SITE.size + length
        return Site(description[_SITE.size : at].decode(), region, description[at:])
    except (struct.error, ValueError, IndexError) as error:
        raise TicketError("the ticket does not describe a pool of the nixl transport") from error


@dataclass(frozen=True, slots=True)
class Ask:
    """The question whether `holder`, an epoch, held a ticket until now.

    `metadata` is the asker's, so that it can be answered.
    """

    number: int
    holder: str
    ticket_id: str
    metadata: bytes

    def pack(self) -> bytes:
        """Return it as a message."""
        holder, ticket = self.holder.encode(), self.ticket_id.encode()
        head = _ASK.pack(_ASKED, self.number, len(holder), len(ticket))
        return head + holder + ticket + self.metadata


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the question of this number."""

    number: int
    held: bool

    def pack(self) -> bytes:
        """Return it as a message."""
        return _ANSWER.pack(_YES if self.held else _NO, self.number)


def parse_message(message: bytes) -> Ask | Answer | None:
    """Return what a peer says; None for a ping and for noise."""
    kind = message[:1]
    try:
        if kind == _ASKED:
            _, number, holder_bytes, ticket_bytes = _ASK.unpack_from(message)
            ticket_at = _ASK.size + holder_bytes
            end = ticket_at + ticket_bytes
            if end > len(message):
                return None
            holder = message[_ASK.size : ticket_at].decode()
            return Ask(number, holder, message[ticket_at:end].decode(), message[end:])
        if kind in {_YES, _NO}:
            return Answer(_ANSWER.unpack(message)[1], kind == _YES)
    except (struct.error, UnicodeDecodeError):
        return None
    return None
