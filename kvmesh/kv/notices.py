"""How a puller tells a holder of the same host that it has copied a ticket's blocks.

Datagrams between abstract sockets named by epoch: nothing to clean up, a dead peer costs
nothing, a stopped one is not waited for. What is told to one peer in the same turn of the
event loop travels in one datagram, because a socket takes only about ten before it is full.
"""

import asyncio
import socket
import struct
from array import array
from collections.abc import Callable

from kvmesh.errors import TransferError

_DATAGRAM_NUMBERS = 4096
_MAX_QUEUED = 16384  # for one peer; what is over it is dropped, and the lease runs out
_RETRY_SECONDS = 0.001
_MAX_RETRIES = 5000


class NoticeDesk:
    """Tells other epochs ticket numbers, and hears theirs. Made in a running loop.

    A notice is lost when its peer dies, or stands still for longer than a lease should.
    """

    def __init__(self, epoch: str, on_notice: Callable[[int], None]) -> None:
        """Raises `TransferError` when there is a desk of this epoch already."""
        self._on_notice = on_notice
        self._loop = asyncio.get_running_loop()
        self._queued: dict[bytes, list[int]] = {}
        self._retries: dict[bytes, int] = {}
        self._flushing: asyncio.Handle | None = None
        self._socket = _bind(epoch)
        self._loop.add_reader(self._socket.fileno(), self._receive)

    def tell(self, epoch: str, number: int) -> None:
        """Send a number at the end of this turn of the loop."""
        queued = self._queued.setdefault(_address(epoch), [])
        if len(queued) < _MAX_QUEUED:
            queued.append(number)
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Hear no more, and send what the sockets take at once. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._flush()
        self._socket.close()
        if self._flushing is not None:
            self._flushing.cancel()

    def _flush(self) -> None:
        """Send what is queued; keep what a full socket does not take for a little later."""
        self._flushing = None
        queued, self._queued = self._queued, {}
        for address, numbers in queued.items():
            left = self._send(address, numbers)
            retries = self._retries.pop(address, 0) + 1
            if left and retries < _MAX_RETRIES:
                self._queued[address] = left
                self._retries[address] = retries
        if self._queued:
            self._flushing = self._loop.call_later(_RETRY_SECONDS, self._flush)

    def _send(self, address: bytes, numbers: list[int]) -> list[int]:
        """Return the numbers that did not fit."""
        for at in range(0, len(numbers), _DATAGRAM_NUMBERS):
            try:
                self._socket.sendto(array("Q", numbers[at : at + _DATAGRAM_NUMBERS]), address)
            except BlockingIOError:
                return numbers[at:]
            except OSError:  # nobody is there any more who could use it
                return []
        return []

    def _receive(self) -> None:
        while True:
            try:
                datagram = self._socket.recv(_DATAGRAM_NUMBERS * 8)
            except BlockingIOError:
                return
            if len(datagram) % 8 == 0:  # else it is not from a desk like this one
                for (number,) in struct.iter_unpack("=Q", datagram):
                    self._on_notice(number)


def _bind(epoch: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    bound.setblocking(False)
    try:
        bound.bind(_address(epoch))
    except OSError as error:
        bound.close()
        raise TransferError(f"cannot listen for pulls: {error.strerror}") from error
    return bound


def _address(epoch: str) -> bytes:
    return b"\0kvmesh-kv-" + epoch.encode()
