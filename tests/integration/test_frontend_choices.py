"""Several answers to one request, echoed prompts and log probabilities, among fakes."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from kvmesh.errors import EngineError
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import CACHED_TOKENS, MODEL, Emit, FakeDecode
from kvmesh.types import FinishReason
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, FrontendConfig(http=HttpConfig(port=0))) as running:
        yield running


async def post(mesh: FakeMesh, body: Mapping[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
        whole = {"model": MODEL, "prompt": "tell me", "max_tokens": 100, **body}
        return await client.post("/v1/completions", json=whole, timeout=20)


async def ask(mesh: FakeMesh, **body: Any) -> dict[str, Any]:
    response = await post(mesh, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(mesh: FakeMesh, **body: Any) -> list[dict[str, Any]]:
    response = await post(mesh, {**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed_texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def by_seed(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
    """Answer with the prompt and the seed."""
    emit(bytes(start.token_ids) + b"/%d" % start.sampling.seed)
    return FinishReason.STOP


async def test_n_choices_are_sampled_from_seeds_of_their_own(mesh: FakeMesh) -> None:
    mesh.decode.script = by_seed
    answer = await ask(mesh, n=3, seed=7)
    assert [c["text"] for c in answer["choices"]] == ["tell me/7", "tell me/8", "tell me/9"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert len(mesh.tokenizer.starts) == 1
    await mesh.idle()


@pytest.mark.parametrize(("seed", "last"), [(2**63 - 1, -(2**63)), (-1, 0)])
async def test_a49_seeds_of_choices_stay_in_int64(mesh: FakeMesh, seed: int, last: int) -> None:
    await ask(mesh, n=2, seed=seed)
    assert sorted(s.sampling.seed for s in mesh.decode.starts) == sorted([seed, last])


async def test_a31_choices_of_a_batch_are_numbered_prompt_by_prompt(mesh: FakeMesh) -> None:
    mesh.decode.script = by_seed
    body = {"prompt": ["a", "b"], "n": 2, "seed": 0}
    answer = await ask(mesh, **body)
    texts = ["a/0", "a/1", "b/0", "b/1"]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert streamed_texts(await events(mesh, **body)) == dict(enumerate(texts))


async def test_a55_usage_of_choices_and_prompts(mesh: FakeMesh) -> None:
    usage = {
        "prompt_tokens": 7 + 2,
        "completion_tokens": 4 * len("Hello, world!"),
        "total_tokens": 9 + 4 * len("Hello, world!"),
        "prompt_tokens_details": {"cached_tokens": 2 * CACHED_TOKENS},
    }
    body = {"prompt": ["tell me", "hi"], "n": 2}
    assert (await ask(mesh, **body))["usage"] == usage
    chunks = await events(mesh, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage


async def test_a55_a_stop_string_counts_what_was_read_and_what_was_cached(mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.babble
    usage = (await ask(mesh, stop=["wor"]))["usage"]
    assert usage["completion_tokens"] == len("Hello, wor")
    assert usage["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}


@pytest.mark.parametrize("prompt", [["hi", ""], [[1, 2], []], ["", "hi"]])
async def test_a09_a_batch_fails_as_a_whole_before_any_work(mesh: FakeMesh, prompt: Any) -> None:
    response = await post(mesh, {"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert not mesh.decode.starts


async def test_a_prompt_that_cannot_be_encoded_fails_the_batch(mesh: FakeMesh) -> None:
    response = await post(mesh, {"prompt": ["x" * 9000, "hi"]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not mesh.router.starts


async def fail_on_b(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
    """Fail for the prompt `b`, and answer others without an end."""
    if bytes(start.token_ids) == b"b":
        await fake.until(lambda: fake.live == 2)
        raise EngineError("broken")
    await fake.gate.wait()
    return FinishReason.STOP


async def test_a_choice_that_fails_ends_the_others(mesh: FakeMesh) -> None:
    mesh.decode.script = fail_on_b
    response = await post(mesh, {"prompt": ["a", "b"]})
    assert response.status_code == 502
    assert set(response.json()) == {"error"}
    await mesh.idle()
    assert not mesh.frontend.process.gate.running


async def test_a_client_that_leaves_ends_all_choices(mesh: FakeMesh) -> None:
    mesh.decode.script = fakes.babble
    body = {"model": MODEL, "prompt": "x", "n": 3, "stream": True}
    async with (
        httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body, timeout=20) as response,
    ):
        await anext(response.aiter_lines())
        await mesh.decode.until(lambda: mesh.decode.live == 3)
    await mesh.idle()
    await mesh.gone()


@pytest.mark.parametrize("prompt", ["tell me", list(b"tell me")])
async def test_an_echoed_prompt_comes_first(mesh: FakeMesh, prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "n": 2}
    answer = await ask(mesh, **body)
    assert [c["text"] for c in answer["choices"]] == ["tell meHello, world!"] * 2
    assert answer["usage"]["completion_tokens"] == 2 * len("Hello, world!")
    assert streamed_texts(await events(mesh, **body)) == dict.fromkeys(
        (0, 1), "tell meHello, world!"
    )


async def test_a22_nothing_to_generate_is_the_prompt_alone(mesh: FakeMesh) -> None:
    answer = await ask(mesh, echo=True, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("tell me", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert not mesh.decode.starts
    assert streamed_texts(await events(mesh, echo=True, max_tokens=0)) == {0: "tell me"}


async def test_a36_echo_with_logprobs_begins_with_one_that_nothing_predicts(
    mesh: FakeMesh,
) -> None:
    mesh.remote = True
    answer = await ask(mesh, echo=True, logprobs=1, prompt="hé", max_tokens=2)
    (choice,) = answer["choices"]
    assert choice["text"] == "héHe"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-1.95, -1.69, -0.72, -1.01]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert not mesh.prefill.starts
    (start,) = mesh.decode.starts
    assert start.sampling.prompt_logprobs == 1


@pytest.mark.parametrize("prompt", ["tell me", "x"])
async def test_a22_logprobs_of_the_prompt_alone(mesh: FakeMesh, prompt: str) -> None:
    answer = await ask(mesh, echo=True, logprobs=0, prompt=prompt, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == prompt
    assert choice["logprobs"]["tokens"] == list(prompt)
    assert answer["usage"]["completion_tokens"] == 0
    await mesh.idle()


async def test_a57_each_token_is_once_in_the_logprobs(mesh: FakeMesh) -> None:
    mesh.decode.answer = "aé XYZW b"
    mesh.decode.script = fakes.babble
    body = {"logprobs": 2, "stop": ["XYZW"]}
    (choice,) = (await ask(mesh, **body))["choices"]
    assert choice["text"] == "aé "
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [-t / 100 for t in "aé ".encode()]
    chunks = await events(mesh, **body)
    rows = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for row in rows for one in row[name]] == choice["logprobs"][name]


async def test_prompt_logprobs_survive_a_worker_that_fails() -> None:
    failed = False

    async def once(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
        nonlocal failed
        if not failed:
            failed = True
            raise EngineError("broken")
        return await fakes.say(fake, start, emit)

    async with fake_mesh(app, FrontendConfig(http=HttpConfig(port=0)), decodes=2) as two:
        for decode in two.decodes:
            decode.script = once
        answer = await ask(two, echo=True, logprobs=0, max_tokens=2)
        assert answer["choices"][0]["text"] == "tell meHe"
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == len("tell meHe")


@pytest.mark.parametrize("stop", ["wor", "l\u2028"])
async def test_what_ended_a_choice_is_told(mesh: FakeMesh, stop: str) -> None:
    mesh.decode.script = fakes.babble
    mesh.decode.answer = "Hello, wor l\u2028"
    (choice,) = (await ask(mesh, stop=[stop]))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    last = (await events(mesh, stop=[stop]))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    mesh.decode.script = fakes.say
    (choice,) = (await ask(mesh))["choices"]
    assert choice["stop_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("go_on", [False, True])
async def test_a_chat_echoes_the_message_that_it_goes_on_with(
    mesh: FakeMesh, stream: bool, go_on: bool
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    if go_on:
        messages.append({"role": "assistant", "content": "Well: "})
    body = {
        "model": MODEL,
        "messages": messages,
        "echo": True,
        "stream": stream,
        "logprobs": True,
        "continue_final_message": go_on,
        "add_generation_prompt": not go_on,
    }
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
        response = await client.post("/v1/chat/completions", json=body, timeout=20)
    assert response.status_code == 200, response.text
    if stream:
        lines = [line for line in response.text.split("\n\n") if line and "[DONE]" not in line]
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        content = "".join(delta["delta"].get("content", "") for delta in deltas)
    else:
        content = response.json()["choices"][0]["message"]["content"]
    assert content == ("Well: " if go_on else "") + "Hello, world!"
    assert not mesh.decode.starts[0].sampling.HasField("prompt_logprobs")
