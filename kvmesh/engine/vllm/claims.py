"""A decode engine asks the prefill engine for its blocks before it pulls them.

vLLM's decode side reads remote memory without asking: it would take whatever lies in
blocks whose lease has ended. So each ticket is claimed first, once, from the engine that
holds it. A claim is one message to the prefill side, `epoch/ticket_id`, and one back, `1`
for yes. It also tells within a second that a prefill worker is dead, where vLLM would
try for five.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvmesh.errors import TicketError, TransferError

_TIMEOUT = 2.0  # seconds for an answer; the asked process only has to look into a table
_YES, _NO = b"1", b"0"

Grant = Callable[[str, str], bool]
"""Says whether the ticket of that epoch and id may be pulled now; marks it as claimed."""


@asynccontextmanager
async def serve_claims(host: str, grant: Grant) -> AsyncIterator[str]:
    """Answer claims by `grant` on a free port of `host`; yields the address to give out."""
    from zmq.asyncio import Context
    from zmq.constants import SocketType

    context = Context()
    try:
        socket = context.socket(SocketType.ROUTER)
        port = socket.bind_to_random_port(f"tcp://{host}")
        answering = asyncio.create_task(_answer(socket, grant))
        try:
            yield f"tcp://{host}:{port}"
        finally:
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering
    finally:
        context.destroy(linger=0)


class Claimant:
    """The asking side. Must be closed."""

    def __init__(self) -> None:
        from zmq.asyncio import Context

        self._context = Context()

    async def claim(self, address: str, epoch: str, ticket_id: str) -> None:
        """Claim a ticket from the engine at `address`.

        Raises `TicketError` if it is held no more or was claimed already, and
        `TransferError` if nobody answers.
        """
        from zmq.constants import SocketType
        from zmq.error import ZMQError

        socket = self._context.socket(SocketType.DEALER)
        try:
            socket.connect(address)
            async with asyncio.timeout(_TIMEOUT):
                await socket.send_multipart([b"", f"{epoch}/{ticket_id}".encode()])
                answer = (await socket.recv_multipart())[-1]
        except TimeoutError as error:
            raise TransferError("the worker that holds the KV does not answer") from error
        except ZMQError as error:
            raise TransferError(f"the worker that holds the KV can't be asked: {error}") from error
        finally:
            socket.close(linger=0)
        if answer != _YES:
            raise TicketError("the ticket is held no more, or was used already")

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._context.destroy(linger=0)


async def _answer(socket: Any, grant: Grant) -> None:
    while True:
        frames = await socket.recv_multipart()
        epoch, _, ticket_id = frames[-1].decode(errors="replace").partition("/")
        await socket.send_multipart([*frames[:-1], _YES if grant(epoch, ticket_id) else _NO])
