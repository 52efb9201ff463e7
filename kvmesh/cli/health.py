"""`kvmesh health ADDRESS`: ask one process how it is, as container health checks do."""

import asyncio
from typing import Annotated

import grpc.aio
import httpx
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.cli.console import CommandError, out, subcommand
from kvmesh.cli.plan import HOST
from kvmesh.cli.settings import own_config

app = subcommand()


@app.command("health")
def health(
    address: Annotated[
        str,
        typer.Argument(
            help="host:port of a gRPC server, or an http:// URL that has to answer 200.",
            show_default="this machine, at the port in KVMESH_RPC_PORT",
        ),
    ] = "",
    service: Annotated[
        str, typer.Option(help="Full name of one gRPC service; empty: the whole process.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0.1)] = 5.0,
) -> None:
    """Ask a process whether it serves; the exit code is 0 if it does, else 1."""
    if address.startswith(("http://", "https://")):
        _ask_http(address, timeout)
    else:
        asyncio.run(_ask_grpc(address or _own_address(), service, timeout))


def _own_address() -> str:
    """Return the address of the process that has the same environment as this one."""
    port = own_config({}).rpc.port
    if not port:
        raise CommandError("whose health? Give host:port, or set KVMESH_RPC_PORT")
    return f"{HOST}:{port}"


def _ask_http(url: str, timeout: float) -> None:
    try:
        response = httpx.get(url, timeout=timeout, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"{url}: {error or type(error).__name__}") from error
    if response.status_code != httpx.codes.OK:
        raise CommandError(f"{url}: HTTP status {response.status_code}")
    out.print("SERVING")


async def _ask_grpc(address: str, service: str, timeout: float) -> None:
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await stub.Check(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"{address}: {error.details() or error.code().name}") from error
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        raise CommandError(f"{address}: {name}")
    out.print(name)
