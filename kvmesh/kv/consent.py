"""How a puller asks a holder of the same host whether a ticket was held until now.

Datagrams between abstract sockets named by epoch: nothing to clean up, a dead peer is seen
at once, a stopped one is not waited for by others. What is asked of one peer in the
same turn of the event loop travels in one datagram, and so do the answers, because a socket
takes only about ten datagrams before it is full.
"""

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from kvmesh.errors import TransferError
from kvmesh.kv.base import OnPulled

_ITEM = struct.Struct("<cQH")  # kind, number of the question, bytes of the ticket's id
_ASK, _YES, _NO = b"?", b"+", b"-"
_DATAGRAM_BYTES = 32768
_MAX_QUEUED = 4096  # for one peer; what is over it is dropped, and its puller times out
_RETRY_SECONDS = 0.001
_MAX_RETRIES = 5000  # about as long as pulls take at most; then the peer's items are dropped


class ConsentDesk:
    """Asks other epochs, and answers them with `on_pulled`. Made in a running loop."""

    def __init__(self, epoch: str, on_pulled: OnPulled) -> None:
        self._on_pulled = on_pulled
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, asyncio.Future[bool]] = {}
        self._count = 0
        self._queued: dict[bytes, list[bytes]] = {}
        self._retries: dict[bytes, int] = {}
        self._flushing: asyncio.Handle | None = None
        self._socket = _bind(epoch)
        self._loop.add_reader(self._socket.fileno(), self._receive)

    async def ask(self, epoch: str, ticket_id: str) -> bool:
        """Return whether `epoch` held the ticket until now; it does not any more.

        Raises `OSError` when nobody of that epoch is there, `TransferError` when closed.
        There may never be an answer: the caller sets a timeout.
        """
        if self._socket.fileno() < 0:
            raise TransferError("the transport was closed")
        self._count += 1
        number = self._count
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._asked[number] = answer
        try:
            self._post(_address(epoch), _item(_ASK, number, ticket_id.encode()))
            return await answer
        finally:
            del self._asked[number]

    def close(self) -> None:
        """Answer no more, and fail what was asked. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self._flushing is not None:
            self._flushing.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(TransferError("the transport was closed"))

    def _post(self, address: bytes, item: bytes) -> None:
        """Send an item with all others for this peer at the end of this turn."""
        queued = self._queued.setdefault(address, [])
        if len(queued) < _MAX_QUEUED:
            queued.append(item)
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what is queued; keep what a full socket does not take for a little later."""
        self._flushing = None
        queued, self._queued = self._queued, {}
        for address, items in queued.items():
            left = self._send(address, items)
            retries = self._retries.pop(address, 0) + 1
            if left and retries < _MAX_RETRIES:
                self._queued[address] = left
                self._retries[address] = retries
        if self._queued:
            self._flushing = self._loop.call_later(_RETRY_SECONDS, self._flush)

    def _send(self, address: bytes, items: list[bytes]) -> list[bytes]:
        """Return the items that did not fit."""
        items = [item for item in items if not self._is_stale(item)]
        sent = 0
        for stop in _cuts(items):
            try:
                self._socket.sendto(b"".join(items[sent:stop]), address)
            except BlockingIOError:
                return items[sent:]
            except OSError as error:
                self._undeliverable(items[sent:], error)
                return []
            sent = stop
        return []

    def _is_stale(self, item: bytes) -> bool:
        kind, number, _ = _ITEM.unpack_from(item)
        return kind == _ASK and number not in self._asked

    def _undeliverable(self, items: list[bytes], error: OSError) -> None:
        """Fail questions to a dead peer. Answers to one are of no use to anybody."""
        for item in items:
            kind, number, _ = _ITEM.unpack_from(item)
            answer = self._asked.get(number) if kind == _ASK else None
            if answer is not None and not answer.done():
                answer.set_exception(error)

    def _receive(self) -> None:
        while True:
            try:
                datagram, sender = self._socket.recvfrom(_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            with suppress(struct.error, ValueError):  # not from a desk like this one
                for kind, number, ticket_id in _items(datagram):
                    self._take(kind, number, ticket_id, sender)

    def _take(self, kind: bytes, number: int, ticket_id: str, sender: bytes) -> None:
        if kind == _ASK and sender:
            self._post(sender, _item(_YES if self._on_pulled(ticket_id) else _NO, number))
        elif kind in {_YES, _NO}:
            answer = self._asked.get(number)
            if answer is not None and not answer.done():
                answer.set_result(kind == _YES)


def _item(kind: bytes, number: int, ticket_id: bytes = b"") -> bytes:
    return _ITEM.pack(kind, number, len(ticket_id)) + ticket_id


def _items(datagram: bytes) -> Iterator[tuple[bytes, int, str]]:
    at = 0
    while at < len(datagram):
        kind, number, size = _ITEM.unpack_from(datagram, at)
        at += _ITEM.size + size
        yield kind, number, datagram[at - size : at].decode()


def _cuts(items: list[bytes]) -> Iterator[int]:
    """Yield where to cut `items` so that each piece fits a datagram."""
    size = 0
    for at, item in enumerate(items):
        if size + len(item) > _DATAGRAM_BYTES and size:
            yield at
            size = 0
        size += len(item)
    if items:
        yield len(items)


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
