"""The client's own dealings with sockets."""

import asyncio

import pytest

from kvmesh.discovery.config import DiscoveryConfig
from kvmesh.discovery.consul_client import ConsulClient
from kvmesh.errors import UnavailableError


async def test_a_query_that_is_cancelled_in_a_tls_handshake_closes_its_socket() -> None:
    greeted, closed = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        greeted.set()
        while await reader.read(4096):
            pass
        closed.set()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        config = DiscoveryConfig(consul_address=f"127.0.0.1:{port}", consul_tls=True)
        async with asyncio.timeout(30), ConsulClient(config) as client:
            query = asyncio.create_task(client.instances("kvmesh-decode", 0, 1))
            await greeted.wait()
            query.cancel()
            await asyncio.wait((query,))
            assert query.cancelled()
            await closed.wait()


async def test_an_agent_that_answers_nonsense_is_unavailable() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with ConsulClient(DiscoveryConfig(consul_address=f"127.0.0.1:{port}")) as client:
            with pytest.raises(UnavailableError, match=str(port)):
                await client.instances("kvmesh-decode", 0, 1)
            with pytest.raises(UnavailableError, match=str(port)):
                await client.service_meta("decode-h-1")
