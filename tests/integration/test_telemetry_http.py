"""The metrics port of a process."""

import asyncio
import socket

import httpx
import pytest

from kvmesh.config import ConfigError
from kvmesh.telemetry import TelemetryConfig, telemetry
from kvmesh.telemetry.exposition import serve_metrics


async def test_metrics_are_served_on_a_port_of_their_own() -> None:
    async with telemetry(TelemetryConfig(), role="router", epoch="e1", environ={}) as opened:
        opened.meter.counter("kvmesh_requests", "Requests.").add(4)
        async with httpx.AsyncClient(base_url=f"http://{opened.metrics_address}") as client:
            answer = await client.get("/metrics?name=x")
            assert (await client.get("/")).status_code == 404
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert "\nkvmesh_requests_total 4.0\n" in answer.text
    assert 'service_instance_id="e1"' in answer.text
    assert 'service_name="kvmesh-router"' in answer.text
    assert b"\nkvmesh_requests_total 4.0\n" in opened.render()


async def test_the_port_is_free_again_afterwards() -> None:
    async with telemetry(TelemetryConfig(), role="router", epoch="e", environ={}) as opened:
        port = int(opened.metrics_address.rpartition(":")[2])
    again = TelemetryConfig(metrics_port=port)
    async with telemetry(again, role="router", epoch="e", environ={}) as opened:
        assert opened.metrics_address == f"127.0.0.1:{port}"


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = TelemetryConfig(metrics_port=port)
        with pytest.raises(ConfigError, match=rf"telemetry\.metrics_port.*127\.0\.0\.1:{port}"):
            async with telemetry(config, role="router", epoch="e", environ={}):
                pass


async def test_silent_connections_do_not_pile_up() -> None:
    with serve_metrics("127.0.0.1", 0, lambda: b"fine\n") as address:
        host, _, port = address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(30)]
        # Past the bound a connection is closed unanswered; those within it wait for a request.
        closed = 0
        for reader, _writer in silent[8:]:
            closed += await reader.read() == b""
        assert closed == 22
        silent[0][1].write(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert (await silent[0][0].read()).endswith(b"fine\n")
        for _reader, writer in silent:
            writer.close()
            await writer.wait_closed()


def test_ipv6_addresses_are_written_as_such() -> None:
    with serve_metrics("::1", 0, lambda: b"fine\n") as address:
        assert httpx.get(f"http://{address}/metrics").text == "fine\n"
        assert address.startswith("[::1]:")
