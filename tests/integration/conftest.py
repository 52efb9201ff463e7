"""Clients of a frontend among fakes, for the modules that have a `mesh` of their own."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from kvmesh.testing.fake_mesh import FakeMesh


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=mesh.url, verify=False, trust_env=False, timeout=20
    ) as one:
        yield one


@pytest.fixture
async def sdk(mesh: FakeMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as one:
        yield one
