"""Anything at all sent to the REST API of real processes: it refuses, answers, lives on."""

import asyncio
import copy
import json
import random
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from kvmesh.config import environment
from kvmesh.testing.cluster import Cluster, cluster, until
from kvmesh.testing.fuzz_http import Answered, Sent, events, exchange, request
from kvmesh.testing.fuzzing import Fuzz
from kvmesh.testing.http import error_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

USUAL = 500
"""Requests of our own fuzzer in a usual run."""

ROUTES = 4.5
"""Routes that schemathesis has examples without end for, about."""

AT_ONCE = 16
SECONDS = 60.0
MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"model": MODEL, "prompt": "Once upon", "max_tokens": 4}

TURNS = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Go on, 🙂."},
]
BODIES: Mapping[str, list[Mapping[str, Any]]] = {
    "/v1/chat/completions": [CHAT, {**CHAT, "messages": TURNS}],
    "/v1/completions": [
        TEXT,
        {**TEXT, "prompt": ["one", "two"]},
        {**TEXT, "prompt": [[1, 2, 3], [4]]},
    ],
    "/tokenize": [{"model": MODEL, "prompt": "Hi"}, {"model": MODEL, "messages": TURNS}],
    "/detokenize": [{"model": MODEL, "tokens": [10, 11, 12]}],
}
SAMPLING: Mapping[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["~", "a"],
    "include_stop_str_in_output": True,
    "stop_token_ids": [40],
    "ignore_eos": True,
    "temperature": 0.7,
    "seed": 5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"50": -100, "51": 5},
    "allowed_token_ids": [60, 61, 62],
    "truncate_prompt_tokens": 2,
    "skip_special_tokens": False,
    "user": "me",
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        "logprobs": True,
        "top_logprobs": 3,
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"x": [1, {"y": None}]},
    },
    "/v1/completions": {**SAMPLING, "echo": True, "logprobs": 2},
    "/tokenize": {"add_special_tokens": False},
    "/detokenize": {},
}
ANSWERS = {
    "/v1/chat/completions": ("ChatCompletion", "ChatCompletionChunk"),
    "/v1/completions": ("Completion", "CompletionChunk"),
    "/tokenize": ("Tokens", ""),
    "/detokenize": ("Detokenized", ""),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    state = tmp_path_factory.mktemp("mesh") / "state"
    # A small context keeps short the answers that nobody has put a limit to.
    fast = ("--set", "engine.sim.latency.speed=0", "--set", "engine.sim.context_length=512")
    async with cluster(state, "--engine", "sim", *fast) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(mesh: Cluster) -> dict[str, Any]:
    async with mesh.client() as client:
        found: dict[str, Any] = (await client.get("/openapi.json")).json()
        return found


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(mesh: Cluster) -> AsyncIterator[None]:
    """After each test the same processes live, hold nothing, answer, and have logged no bug."""
    before = {process["pid"] for process in await mesh.status()}
    yield
    assert {process["pid"] for process in await mesh.status()} == before
    await until(lambda: idle(mesh), SECONDS)
    async with mesh.client() as client:
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
    for log in (mesh.state / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log.name


async def idle(mesh: Cluster) -> bool:
    workers = [*await mesh.of("prefill"), *await mesh.of("decode")]
    return all(
        w["load"] and not (w["load"]["running"] or w["load"]["used_blocks"]) for w in workers
    )


# Requests near good ones


async def test_bent_requests_are_refused_or_answered(
    mesh: Cluster, document: dict[str, Any], fuzz: Fuzz
) -> None:
    address = mesh.url.removeprefix("http://")
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        rng = random.Random(f"{fuzz.seed}/{number}")
        async with room:
            sent = request(rng, *good(rng))
            try:
                got = await exchange(address, sent, SECONDS)
                fuzz.saw("rest bent requests", str(got.status) if got else "hung up")
                check(sent, got, document)
            except Exception as error:
                error.add_note(f"request {number} of seed {fuzz.seed}: {sent.data[:3000]!r}")
                raise

    async with asyncio.TaskGroup() as group:
        for number in range(fuzz.count(USUAL, share=0.5)):
            group.create_task(one(number))


def good(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body for it: most of these are right."""
    path = rng.choice((*BODIES, "/v1/chat/completions", "/v1/completions"))
    more = MORE[path]
    names = rng.sample(sorted(more), rng.randint(0, min(4, len(more))))
    return path, {**rng.choice(BODIES[path]), **{name: more[name] for name in names}}


def check(sent: Sent, got: Answered | None, document: dict[str, Any]) -> None:
    if got is None:
        assert not sent.whole, "no answer at all"
        return
    assert got.status < 500, got
    if got.status >= 400:
        assert got.headers["content-type"] == "application/json"
        if not sent.data.startswith(b"HEAD"):
            assert len(error_of(got.body)["message"]) < 1500
        return
    method, path, _ = sent.data.split(b" ", 2)
    if got.status != 200 or method != b"POST":
        return
    answer, chunk = ANSWERS[path.decode().partition("?")[0]]
    if got.headers["content-type"] == "application/json":
        conforms(json.loads(got.body), answer, document)
        return
    assert got.headers["content-type"].startswith("text/event-stream")
    *parts, last = events(got.body)
    assert last == "[DONE]"
    for part in parts:
        conforms(json.loads(part), chunk, document)


def conforms(value: Any, schema: str, document: dict[str, Any]) -> None:
    whole = {"$ref": f"#/components/schemas/{schema}", "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


@pytest.mark.parametrize("stream", [False, True])
async def test_more_choices_than_memory_holds_are_refused_at_once(
    mesh: Cluster, stream: bool
) -> None:
    async with mesh.client() as client:
        for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for n in (129, 2**32, 2**62):
                wanted = {**body, "n": n, "stream": stream}
                response = await client.post(route, json=wanted, timeout=20)
                assert response.status_code == 400
                assert error_of(response.content)["param"] == "n"


async def test_ids_outside_of_the_vocabulary_are_the_callers_fault(mesh: Cluster) -> None:
    async with mesh.client() as client:
        for route, body in (
            ("/detokenize", {"tokens": [1, 100_000]}),
            ("/v1/completions", {"prompt": [1, 100_000]}),
        ):
            response = await client.post(route, json={"model": MODEL, **body})
            assert response.status_code == 400
            assert error_of(response.content)["param"] == next(iter(body))


# Requests made from the API's own description


async def test_the_description_holds_against_schemathesis(
    mesh: Cluster, document: dict[str, Any], fuzz: Fuzz, tmp_path: Path
) -> None:
    described, report = tmp_path / "openapi.json", tmp_path / "report.json"
    described.write_text(json.dumps(narrowed(document)))
    flags = ["--url", mesh.url, "--checks", "all", "--generation-database", "none", "--no-color"]
    # That some fields exclude each other is not in the description.
    flags += ["--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all"]
    flags += ["--report", "json", "--report-json-path", str(report), "--seed", str(fuzz.seed)]
    flags += ["--continue-on-failure", "--phases"]
    # Without a count: every boundary of the description once, about 1,500 requests.
    many = fuzz.count(0, share=0.5)
    flags += (
        ["coverage,fuzzing", "--max-examples", str(round(many / ROUTES))] if many else ["coverage"]
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", str(described), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
        env={**environment(), "NO_PROXY": "127.0.0.1"},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-20_000:]
    cases = json.loads(report.read_text())["test_cases"]
    fuzz.saw("rest schemathesis", "good", cases["generated"])
    assert cases["generated"] > 1000
    assert not cases["with_failures"]


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The description as it is of this mesh: its one model, errors without more members.

    Good requests then get to the engine, and cost little.
    """
    narrow = copy.deepcopy(document)
    schemas = narrow["components"]["schemas"]
    for name in ("ChatCompletion", "Completion", "Tokenize", "Detokenize"):
        schema = schemas[f"{name}Request"]
        for form in schema.get("anyOf", [schema]):
            fields = form["properties"]
            fields["model"] = {"enum": [MODEL]}
            for field, most in (("max_tokens", 16), ("max_completion_tokens", 16), ("n", 3)):
                if field in fields:
                    fields[field]["maximum"] = most
    for schema in (schemas["Error"], schemas["Error"]["properties"]["error"]):
        schema["additionalProperties"] = False
    for methods in narrow["paths"].values():
        for operation in methods.values():
            # A string in OpenAPI, but read as events by schemathesis; our own fuzzer reads them.
            content = operation["responses"]["200"]["content"]
            content.update({kind: {} for kind in content if kind == "text/event-stream"})
    return narrow
