"""The mesh with a real model on its real engines: prefill and decode apart, KV over NIXL."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from kvmesh.config import environment
from kvmesh.testing.cluster import Cluster, cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours of the rainbow. " * 6,
    "Count from one to five in words.",
)

# The engines in one process, without the mesh: same model, same numbers, one prompt at a time.
VLLM_ALONE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2048,
          block_size=32, seed=0)
answers = []
for question in json.loads(sys.argv[2]):
    messages = [{"role": "user", "content": question}]
    out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0]
    answers.append([out.outputs[0].text, out.outputs[0].finish_reason,
                    len(out.prompt_token_ids), len(out.outputs[0].token_ids)])
print("ALONE " + json.dumps(answers))
"""
TORCH_ALONE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
answers = []
for question in json.loads(sys.argv[2]):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, do_sample=False, max_new_tokens=24)[0][ids.shape[1]:]
    ended = out[-1].item() == tokenizer.eos_token_id
    answers.append([tokenizer.decode(out, skip_special_tokens=True),
                    "stop" if ended else "length", ids.shape[1], len(out)])
print("ALONE " + json.dumps(answers))
"""
ALONE = {"torch": TORCH_ALONE, "vllm": VLLM_ALONE}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(ALONE))
async def mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    state = tmp_path_factory.mktemp(request.param) / "state"
    async with cluster(state, "--engine", request.param) as running:
        yield running


def ask(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0, **more}


async def answers(mesh: Cluster) -> list[dict[str, Any]]:
    async with mesh.client() as client:
        responses = [await client.post("/v1/chat/completions", json=ask(q)) for q in QUESTIONS]
    assert [response.status_code for response in responses] == [200] * len(QUESTIONS)
    return [response.json() for response in responses]


async def settled(mesh: Cluster) -> bool:
    workers = [*await mesh.of("prefill"), *await mesh.of("decode")]
    loads = [worker["load"] for worker in workers]
    return all(
        load and not (load["running"] or load["waiting"] or load["ticket_bytes"]) for load in loads
    )


async def test_five_roles_live_and_the_first_answer_names_paris(mesh: Cluster) -> None:
    processes = await mesh.status()
    assert {p["role"] for p in processes} == {
        "frontend",
        "tokenizer",
        "router",
        "prefill",
        "decode",
    }
    assert all(p["state"] == "ready" and p["pid"] and p["epoch"] for p in processes)
    first, *_ = await answers(mesh)
    assert "Paris" in first["choices"][0]["message"]["content"]


async def test_each_remote_prefill_moves_kv_over_nixl_and_tickets_end(mesh: Cluster) -> None:
    (decode,) = await mesh.of("decode")
    (prefill,) = await mesh.of("prefill")
    received = (await mesh.metrics(decode))["kvmesh_kv_received_bytes_total"]
    for n in range(3):
        async with mesh.client() as client:
            body = ask(f"Question number {n}: what do bees make, and why? " * 4)
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
        more = await until(lambda before=received: _grown(mesh, decode, before), 20)
        received = more
    await until(lambda: settled(mesh), 20)
    assert (await mesh.metrics(prefill))["kvmesh_engine_ticket_bytes"] == 0


async def _grown(mesh: Cluster, decode: dict[str, Any], before: float) -> float:
    now = (await mesh.metrics(decode))["kvmesh_kv_received_bytes_total"]
    return now if now > before else 0.0


async def test_streamed_and_not_and_every_client_get_the_text_of_the_engine_alone(
    mesh: Cluster,
) -> None:
    got = await answers(mesh)
    plain = [answer["choices"][0]["message"]["content"] for answer in got]
    async with mesh.client() as client:
        raw = [await _streamed(client, ask(q, stream=True)) for q in QUESTIONS]
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="unused") as package:
        whole, parts = [], []
        for question in QUESTIONS:
            body = ask(question)
            completion = await package.chat.completions.create(**body)
            whole.append(completion.choices[0].message.content)
            stream = await package.chat.completions.create(**body, stream=True)
            parts.append("".join([c.choices[0].delta.content or "" async for c in stream]))
    assert raw == whole == parts == plain
    alone = await _alone(mesh)
    assert [
        [
            a["choices"][0]["message"]["content"],
            a["choices"][0]["finish_reason"],
            a["usage"]["prompt_tokens"],
            a["usage"]["completion_tokens"],
        ]
        for a in got
    ] == alone


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += choices[0]["delta"].get("content") or ""
    return text


async def _alone(mesh: Cluster) -> list[Any]:
    started = json.loads((mesh.state / "cluster.json").read_text())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        ALONE[started["engine"]],
        started["model_path"],
        json.dumps(QUESTIONS),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**environment(), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    )
    async with asyncio.timeout(300):
        out, _ = await process.communicate()
    lines = [line for line in out.decode().splitlines() if line.startswith("ALONE ")]
    assert lines, out.decode()[-3000:]
    texts: list[Any] = json.loads(lines[0].removeprefix("ALONE "))
    return texts


async def test_a_client_that_leaves_frees_the_engines(mesh: Cluster) -> None:
    async with mesh.client() as client:
        body = ask("Tell me a very long story about a ship. " * 4, max_tokens=1500, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            while "content" not in await anext(lines):
                pass
            assert not await settled(mesh)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json={**body, "stream": False}, timeout=1.5)
    await until(lambda: settled(mesh), 20)


async def test_bad_input_is_refused_before_it_reaches_an_engine(mesh: Cluster) -> None:
    (frontend,) = await mesh.of("frontend")
    workers = [*await mesh.of("prefill"), *await mesh.of("decode")]
    taken = [(await mesh.metrics(w))["kvmesh_taken_total"] for w in workers]
    cases: list[tuple[Any, int, str | None]] = [
        ({**ask(""), "messages": []}, 400, "messages"),
        (ask("long " * 9000), 400, "messages"),
        ({**ask("x"), "model": "nobody"}, 404, "model"),
        (b"{not json", 400, None),
        ({**ask("x"), "temperature": "hot"}, 400, "temperature"),
        ({**ask("x"), "top_p": 1.5}, 400, "top_p"),
        ({**ask("x"), "max_tokens": -1}, 400, "max_tokens"),
    ]
    async with mesh.client() as client:
        for body, status, param in cases:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await client.post(
                "/v1/chat/completions",
                content=content,
                headers={"content-type": "application/json"},
            )
            assert response.status_code == status, response.text
            error = response.json()["error"]
            assert error["param"] == param, error
            assert error["message"]
    assert [(await mesh.metrics(w))["kvmesh_taken_total"] for w in workers] == taken
    assert frontend["pid"] == (await mesh.of("frontend"))[0]["pid"]
