"""What a frontend counts, among fakes: each request once, in every ending, under bounded labels."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.errors import UnavailableError
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL, FakeDecode
from kvmesh.testing.http import connected
from kvmesh.types import FinishReason
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": MODEL, "prompt": "tell me", "max_tokens": 100}


def config(seconds: float = 60.0) -> FrontendConfig:
    return FrontendConfig(http=HttpConfig(port=0), limits=LimitsConfig(request_seconds=seconds))


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, config()) as running:
        yield running


@pytest.fixture
async def apart() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, config(), remote=True) as running:
        yield running


async def ask(mesh: FakeMesh, path: str = TEXT, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False, timeout=20) as client:
        return await client.post(path, json={**BODY, **more})


async def leave(mesh: FakeMesh, **more: Any) -> None:
    """Send a request, wait until it decodes, and hang up."""
    before = len(mesh.decode.starts)
    async with connected(mesh.url.removeprefix("http://")) as raw:
        raw.post(TEXT, {**BODY, **more})
        await mesh.decode.until(lambda: len(mesh.decode.starts) > before)


class Page:
    """A frontend's metrics at one moment."""

    def __init__(self, mesh: FakeMesh) -> None:
        page = mesh.frontend.process.telemetry.render().decode()
        self.samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        return sum(
            value
            for found, of, value in self.samples
            if found == name and all(of.get(key) == wanted for key, wanted in labels.items())
        )

    def counts(self, name: str, label: str) -> dict[str, float]:
        return {of[label]: value for found, of, value in self.samples if found == name}

    def values(self, label: str) -> set[str]:
        return {of[label] for _, of, _ in self.samples if label in of}


async def test_a_request_is_recorded_under_both_of_its_names(apart: FakeMesh) -> None:
    assert (await ask(apart)).status_code == 200
    await apart.gone()
    page = Page(apart)
    assert page("kvmesh_requests_total", model=MODEL, outcome="ok") == 1
    assert page("kvmesh_finished_total", model=MODEL, finish_reason="stop") == 1
    assert page("kvmesh_prompt_tokens_total", model=MODEL) == 7
    assert page("kvmesh_completion_tokens_total", model=MODEL) == 13
    assert page("kvmesh_cached_tokens_total", model=MODEL) == 3
    for name in ("kvmesh_ttft_seconds", "kvmesh_tpot_seconds", "kvmesh_e2e_seconds"):
        assert page(f"{name}_count", model=MODEL) == 1, name
    standard = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "kvmesh",
        "gen_ai_request_model": MODEL,
    }
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert page(f"gen_ai_server_{name}_seconds_count", **standard) == 1, name
    used = "gen_ai_client_token_usage"
    assert page(f"{used}_sum", **standard, gen_ai_token_type="input") == 7
    assert page(f"{used}_sum", **standard, gen_ai_token_type="output") == 13
    assert not page.values("error_type")
    assert page("kvmesh_http_responses_total", route=TEXT, status="200") == 1


async def test_several_prompts_and_answers_are_one_request(mesh: FakeMesh) -> None:
    response = await ask(mesh, prompt=["a", "bc"], n=3)
    usage = response.json()["usage"]
    await mesh.gone()
    page = Page(mesh)
    assert page("kvmesh_requests_total") == page("kvmesh_e2e_seconds_count") == 1
    assert page("kvmesh_ttft_seconds_count") == 1
    assert page("kvmesh_finished_total", finish_reason="stop") == 6
    assert page("kvmesh_tpot_seconds_count") == 6
    assert page("kvmesh_prompt_tokens_total") == usage["prompt_tokens"] == 3
    assert page("kvmesh_completion_tokens_total") == usage["completion_tokens"] == 6 * 13
    assert page("gen_ai_client_token_usage_count", gen_ai_token_type="output") == 1
    assert page("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 6 * 13


async def test_a_stop_string_is_counted_as_it_is_billed(mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.babble
    usage = (await ask(mesh, stop=["wor"])).json()["usage"]
    await mesh.gone()
    page = Page(mesh)
    assert page("kvmesh_completion_tokens_total") == usage["completion_tokens"] < 13
    assert page.counts("kvmesh_finished_total", "finish_reason") == {"stop": 1}


async def test_a41_aborted_requests_are_counted_and_leave_nothing_running(
    apart: FakeMesh,
) -> None:
    apart.decode.script = fakes.stall
    for _ in range(5):
        await leave(apart)
    await apart.gone()
    apart.decode.script = fakes.babble
    apart.prefill.first = b"He"
    for _ in range(5):
        await leave(apart, n=2)
    await apart.gone()
    page = Page(apart)
    assert page("kvmesh_running", role="frontend") == 0
    assert page("kvmesh_requests_total", outcome="cancelled") == 10
    assert page.counts("kvmesh_finished_total", "finish_reason") == {"abort": 15}
    assert page.counts("kvmesh_request_errors_total", "reason") == {"CANCELLED": 10}
    assert page("gen_ai_server_request_duration_seconds_count", error_type="CANCELLED") == 10
    # Those that had no token by then have no time to it; none of them has a whole answer.
    assert page("kvmesh_ttft_seconds_count") == 5
    assert page("kvmesh_e2e_seconds_count") == page("kvmesh_tpot_seconds_count") == 0
    assert page("kvmesh_prompt_tokens_total") == 10 * 7
    assert page("kvmesh_completion_tokens_total") >= 5 * 2 * 2


async def test_a41_a_role_alone_is_no_first_token(mesh: FakeMesh) -> None:
    async def failing(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        await fake.gate.wait()
        raise UnavailableError("gone")

    mesh.decode.script = failing
    mesh.decode.gate.set()
    more = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    body = {"model": MODEL, **more}
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
        assert (await client.post(CHAT, json=body, timeout=20)).status_code == 503
    await mesh.gone()
    page = Page(mesh)
    assert page("kvmesh_ttft_seconds_count") == 0
    assert page("gen_ai_server_time_to_first_token_seconds_count") == 0
    assert page.counts("kvmesh_finished_total", "finish_reason") == {"error": 1}


async def test_a41_an_echo_alone_is_no_first_token(mesh: FakeMesh) -> None:
    assert (await ask(mesh, echo=True, max_tokens=0, logprobs=1)).status_code == 200
    await mesh.gone()
    page = Page(mesh)
    assert page("kvmesh_ttft_seconds_count") == 0
    assert page("kvmesh_completion_tokens_total") == 0
    assert page("kvmesh_requests_total", outcome="ok") == 1


async def test_a03_an_answer_that_breaks_off_is_an_error(mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.die_later
    mesh.decode.gate.set()
    await ask(mesh, stream=True)
    await mesh.gone()
    page = Page(mesh)
    assert page.counts("kvmesh_requests_total", "outcome") == {"unavailable": 1}
    assert page.counts("kvmesh_request_errors_total", "reason") == {"UNAVAILABLE": 1}
    assert page.counts("kvmesh_finished_total", "finish_reason") == {"error": 1}
    assert page("gen_ai_server_request_duration_seconds_count", error_type="UNAVAILABLE") == 1
    assert page("kvmesh_completion_tokens_total") == 5
    assert page("kvmesh_ttft_seconds_count") == 1
    assert page("kvmesh_e2e_seconds_count") == 0


async def test_a_deadline_is_an_error_of_its_own() -> None:
    async with fake_mesh(app, config(seconds=0.3)) as mesh:
        mesh.decode.script = fakes.stall
        mesh.decode.ignores_deadlines = True
        assert (await ask(mesh)).status_code == 504
        await mesh.gone()
        page = Page(mesh)
        mesh.decode.gate.set()
    assert page.counts("kvmesh_requests_total", "outcome") == {"timeout": 1}
    assert page.counts("kvmesh_request_errors_total", "reason") == {"DEADLINE_EXCEEDED": 1}


HOSTILE = [
    "x" * 10_000,
    "a\nkvmesh_requests_total 9",
    'b"} 1',
    "c\\",
    "../../etc",
    "\u202e\u0000é",
    "models/" + MODEL,
]


async def test_labels_hold_nothing_that_a_caller_wrote(mesh: FakeMesh) -> None:
    bad: list[dict[str, Any]] = [
        *({"model": name} for name in HOSTILE),
        *({"user": name, "n": 0} for name in HOSTILE),
        *({name: 1} for name in HOSTILE),
    ]
    for more in bad:
        assert (await ask(mesh, **more)).status_code in (400, 404)
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
        for name in ("/v1/x/y", "/v1/models/abc", "/%0a%22", f"/{'z' * 5_000}"):
            assert (await client.get(name)).status_code in (400, 404, 414)
        headers = {"x-request-id": "canary", "user-agent": "canary"}
        await client.post(TEXT, json=BODY, headers=headers, timeout=20)
        assert (await client.request("PROPFIND", TEXT)).status_code == 405
    await mesh.gone()
    page = Page(mesh)
    assert page.values("model") == {MODEL, "other"}
    assert page.values("gen_ai_request_model") == {MODEL, "other"}
    assert page.values("outcome") == {"invalid", "ok"}
    assert page.values("reason") == {"INVALID_ARGUMENT", "UNKNOWN_MODEL"}
    assert page.values("finish_reason") == {"stop", "error"}
    assert page.values("role") == {"frontend"}
    assert page.values("route") <= {TEXT, "/v1/models/{model}", "other"}
    assert page("kvmesh_requests_total", outcome="invalid") == len(bad)
    assert "canary" not in mesh.frontend.process.telemetry.render().decode()


async def test_every_histogram_of_seconds_reaches_beyond_the_longest_request(
    mesh: FakeMesh,
) -> None:
    await ask(mesh)
    await mesh.gone()
    bounds: dict[str, set[float]] = {}
    for name, labels, _ in Page(mesh).samples:
        if name.endswith("_seconds_bucket"):
            bounds.setdefault(name, set()).add(float(labels["le"]))
    assert {"kvmesh_ttft_seconds_bucket", "gen_ai_server_request_duration_seconds_bucket"} <= set(
        bounds
    )
    longest = LimitsConfig().request_seconds
    for name, found in bounds.items():
        if "per_output_token" not in name:
            assert sorted(found)[-2] > longest, name
    ours = [found for name, found in bounds.items() if name.startswith("kvmesh_")]
    assert all(found == ours[0] for found in ours)


async def test_texts_are_timed_one_by_one(mesh: FakeMesh) -> None:
    read: asyncio.Queue[None] = asyncio.Queue()

    async def one_by_one(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        for token in b"abcdef":
            emit([token])
            await read.get()
        return FinishReason.STOP

    mesh.decode.script = one_by_one
    async with (
        httpx.AsyncClient(base_url=mesh.url, trust_env=False, timeout=20) as client,
        client.stream("POST", TEXT, json={**BODY, "stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                read.put_nowait(None)
    await mesh.gone()
    assert Page(mesh)("kvmesh_itl_seconds_count") == len("abcdef") - 1
