"""Keys on the REST API: nothing but what says whether the process lives is open."""

import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.testing.http import connected, error_of
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig

KEY = "sk-ключ"
CONFIG = FrontendConfig(http=HttpConfig(port=0, api_keys=("sk-one", KEY)))
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
GOOD = {"authorization": "Bearer sk-one"}


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, CONFIG) as running:
        yield running


def refused(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    if response.request.method != "HEAD":
        error = error_of(response.content)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "sk-one" not in error["message"]


PATHS = (
    *("/v1/models", f"/v1/models/{MODEL}", "/metrics", "/version", "/openapi.json", "/docs"),
    *(CHAT, "/v1/completions", "/tokenize", "/detokenize", "/nope", "/", "/invocations"),
    *("//v1/models", "/v1/../v1/models", "/health/", "/health/x", "/HEALTH", "//health"),
    *("/v1/models/../../health", "/%2fhealth", "/ready%00", "/health%20", "/health;x", "*"),
)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "TRACE", "HEAD"])
async def test_a25_everything_wants_a_key(mesh: FakeMesh, method: str) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        for path in PATHS:
            raw.writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            status, headers, body = await raw.response(bodiless=method == "HEAD")
            assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
            assert method == "HEAD" or error_of(body)["code"] == "invalid_api_key"
    assert not mesh.tokenizer.starts


@pytest.mark.parametrize(
    "values",
    [
        [b"Bearer wrong"],
        [b"sk-one"],
        [b"Basic sk-one"],
        ["Bearer ключ".encode()],
        [b"Bearer \xff"],
        [b"Bearer sk-one", b"Bearer sk-one"],
        [b"Bearer wrong", b"Bearer sk-one"],
        [b"Bearer " + b"x" * 100_000],
    ],
)
async def test_a25_bad_keys(client: httpx.AsyncClient, values: list[bytes]) -> None:
    headers = [(b"authorization", value) for value in values]
    refused(await client.post(CHAT, json=BODY, headers=headers))
    refused(await client.get("/v1/models", headers=headers))


async def test_a25_the_body_is_not_looked_at_without_a_key(client: httpx.AsyncClient) -> None:
    refused(await client.post(CHAT, content=b"\xff", headers={"content-type": "text/plain"}))


async def test_a25_probes_need_no_key_and_learn_little(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready"):
        for method in ("GET", "HEAD"):
            assert (await client.request(method, path)).status_code == 200
        refused(await client.post(path))
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.get("/ready", headers=GOOD)).json()["models"] == [MODEL]


async def test_a40_a_preflight_needs_no_key(client: httpx.AsyncClient) -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    response = await client.options(CHAT, headers=headers)
    assert response.status_code == 204
    refused(await client.options("/nope", headers=headers))


async def test_a25_each_key_is_good(mesh: FakeMesh, client: httpx.AsyncClient) -> None:
    for key in ("sk-one", KEY):
        headers = {b"authorization": f"bearer {key}".encode()}
        assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 200
        assert (await client.get("/nope", headers=headers)).status_code == 404
        assert (await client.get(CHAT, headers=headers)).status_code == 405


async def test_openai_package_raises_what_it_should_for_a_key(mesh: FakeMesh) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="wrong", max_retries=0, timeout=20
    ) as sdk:
        with pytest.raises(openai.AuthenticationError) as wrong:
            _ = [model async for model in sdk.models.list()]
        assert wrong.value.code == "invalid_api_key"
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="sk-one", max_retries=0, timeout=20
    ) as sdk:
        assert [model.id async for model in sdk.models.list()] == [MODEL]


async def test_a25_a_raw_key_that_is_no_text(mesh: FakeMesh) -> None:
    async with connected(mesh.frontend.member.http_address) as raw:
        raw.post(CHAT, BODY, "Authorization: Bearer \N{LATIN SMALL LETTER Y WITH DIAERESIS}")
        status, headers, body = await raw.response()
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
