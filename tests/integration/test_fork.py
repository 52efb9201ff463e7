"""Processes that fork: nothing that would not survive it is made by importing."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.server import serve

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import asyncio, os, sys, threading
import services.decode.app, services.frontend.app, services.prefill.app
import services.router.app, services.tokenizer.app
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.rpc.config import RpcConfig
from kvmesh.telemetry import quiet_telemetry

assert threading.active_count() == 1, threading.enumerate()

async def call():
    address, options = sys.argv[1], RpcConfig().channel_options()
    with quiet_telemetry().tracer.span("a span"):
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status), flush=True)

pid = os.fork()
if pid == 0:
    asyncio.run(call())
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
asyncio.run(call())
"""


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    async with serve(RpcConfig(), {}) as running:
        await running.set_serving(True)
        yield f"127.0.0.1:{running.port}"


async def test_a61_a_child_forked_after_all_imports_calls_and_ends() -> None:
    async with server() as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            CHILD,
            address,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out.decode().split() == ["SERVING", "SERVING"]
