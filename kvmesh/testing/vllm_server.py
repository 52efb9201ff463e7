"""vLLM's own OpenAI server as a process, to compare the mesh with."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

from kvmesh.config import environment
from kvmesh.testing.cluster import POLL_SECONDS, START_SECONDS, free_ports

STOP_SECONDS = 20.0
"""For the server and its engine core to end by themselves."""

_CPU_FLAGS = {
    "dtype": "float32",  # only there is greedy text independent of the batch
    "distributed-executor-backend": "uni",
    "kv-cache-memory-bytes": str(1 << 30),
    "max-num-batched-tokens": "2048",
    "max-num-seqs": "64",
    "block-size": "32",
}
_CPU_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the executor `uni` asks for it on a CPU
    # Threads that spin for each other stand still where something else runs too.
    "OMP_NUM_THREADS": "1",
}


@asynccontextmanager
async def vllm_server(
    model: Path, name: str, log: Path, *, context_length: int
) -> AsyncIterator[str]:
    """Yield the URL of a vLLM server on the CPU that serves the folder `model` as `name`.

    What it prints goes to `log`. Raises `AssertionError` with the end of that if it does
    not come up; stops it, and all that it started, in the end.
    """
    (port,) = free_ports(1)
    flags = {
        **_CPU_FLAGS,
        "model": str(model),
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": str(port),
        "max-model-len": str(context_length),
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            # The CPU build's `vllm serve` looks for a package of another name, and fails.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
            *[part for flag, value in flags.items() for part in (f"--{flag}", value)],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment(), **_CPU_VARIABLES},
            start_new_session=True,  # so that its engine core can be ended with it
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _ready(process, url, log)
        yield url
    finally:
        await _stop(process)


async def _ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    try:
        async with (
            asyncio.timeout(START_SECONDS),
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            while not await _answers(client):
                if process.returncode is not None:
                    raise AssertionError(f"vLLM's server ended:\n{_end_of(log)}")
                await asyncio.sleep(10 * POLL_SECONDS)
    except TimeoutError as error:
        raise AssertionError(f"vLLM's server did not come up:\n{_end_of(log)}") from error


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that it leads
        await process.wait()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
