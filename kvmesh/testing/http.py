"""Bare HTTP connections, for what no client library would send."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any


class Raw:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def post(self, path: str, body: Any, *headers: str) -> None:
        """Send a request with a JSON body, without waiting for anything."""
        data = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *headers,
        ]
        self.writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + data)

    async def response(self, *, bodiless: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Read a response that says how long it is: status, headers in lower case, body.

        `bodiless`: there is none, whatever the response says of its length (HEAD).
        """
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        length = 0 if bodiless else int(headers.get("content-length", 0))
        body = await self.reader.readexactly(length)
        return int(first.split()[1]), headers, body

    async def close(self) -> None:
        """Hang up."""
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Raw]:
    """Yield a connection to `host:port`; what it does not read is felt soon."""
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    except OSError:
        sock.close()
        raise
    raw = Raw(*await asyncio.open_connection(sock=sock))
    try:
        yield raw
    finally:
        with suppress(OSError):
            await raw.close()


def error_of(body: bytes) -> dict[str, Any]:
    """Return the error in a body, which has to be in OpenAI's shape."""
    document = json.loads(body)
    assert list(document) == ["error"], document
    error: dict[str, Any] = document["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert error["code"]
    return error
