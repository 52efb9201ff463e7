"""Several choices, log probabilities, echo, tokens: through the `openai` package and raw."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL
from kvmesh.testing.http import error_of
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig

CONFIG = FrontendConfig(http=HttpConfig(port=0), limits=LimitsConfig(choices=8))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "messages": MESSAGES}


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, CONFIG) as running:
        yield running


async def test_a31_several_choices_of_a_chat(mesh: FakeMesh, sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {mesh.decode.answer}
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    for index in range(3):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert [c.delta.role for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(c.delta.content or "" for c in own) == mesh.decode.answer
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["stop"]
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3 * len(mesh.decode.answer)


async def test_a31_several_prompts_of_a_completion(mesh: FakeMesh, sdk: openai.AsyncOpenAI) -> None:
    prompts: Any = ["one", "three"]
    whole = await sdk.completions.create(model=MODEL, prompt=prompts, n=3, echo=True)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == [
        prompt + mesh.decode.answer for prompt in prompts for _ in range(3)
    ]
    stream = await sdk.completions.create(
        model=MODEL,
        prompt=prompts,
        n=3,
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    for choice in whole.choices:
        own = [one for one in told if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + ["stop"]
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("one") + len("three")


async def test_a31_ids_as_prompts(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.completions.create(
        model=MODEL, prompt=[[104, 105], [33]], echo=True, max_tokens=0
    )
    assert [choice.text for choice in whole.choices] == ["hi", "!"]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 0)


async def test_a03_one_choice_that_fails_fails_the_answer(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    async def fail_once(fake: Any, start: Any, emit: fakes.Emit) -> Any:
        script = fakes.die_later if len(fake.starts) == 2 else fakes.babble
        return await script(fake, start, emit)

    mesh.decode.script = fail_once
    async with client.stream("POST", CHAT, json={**BODY, "n": 2, "stream": True}) as response:
        assert response.status_code == 200
        text = ""
        async for part in response.aiter_text():
            text += part
            if text.count("Hello") == 2:
                mesh.decode.gate.set()
    assert json.loads(text.split("data: ")[-1])["error"]["code"] == "unavailable"
    assert "[DONE]" not in text
    await mesh.idle()


async def test_more_choices_than_allowed_are_refused(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    for path, body in (
        (CHAT, {**BODY, "n": 9}),
        (TEXT, {"model": MODEL, "prompt": ["a", "b", "c"], "n": 3}),
        (TEXT, {"model": MODEL, "prompt": ["a"] * 9}),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        assert error_of(response.content)["param"] in ("n", "prompt")
    assert not mesh.tokenizer.starts


async def test_tokens_and_back(mesh: FakeMesh, client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"model": MODEL, "prompt": "hi 🙂"})
    assert response.status_code == 200
    tokens = list("hi 🙂".encode())
    assert response.json() == {
        "count": len(tokens),
        "max_model_len": 8192,
        "tokens": tokens,
        "token_strs": None,
    }
    response = await client.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert response.json() == {"prompt": "hi 🙂"}
    response = await client.post("/tokenize", json=BODY)
    assert bytes(response.json()["tokens"]) == b"user:hi"
    assert not mesh.decode.starts
    assert not mesh.router.starts
    await mesh.idle()


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "no-such-model", "prompt": "x"}, 404, "model"),
        ("/detokenize", {"model": "no-such-model", "tokens": [1]}, 404, "model"),
        ("/tokenize", {"model": MODEL}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/detokenize", {"model": MODEL}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [2**40]}, 400, "tokens"),
    ],
)
async def test_tokens_are_refused_by_name(
    client: httpx.AsyncClient, path: str, body: Any, status: int, param: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == status
    assert error_of(response.content)["param"] == param


@pytest.mark.parametrize(
    ("headers", "body", "echoed"),
    [
        ({}, {"request_id": "mine"}, "mine"),
        ({"x-request-id": "header"}, {"request_id": "mine"}, "header"),
        ({"x-request-id": "not valid"}, {"request_id": "mine"}, "mine"),
    ],
)
async def test_a08_an_id_in_the_body_is_echoed(
    client: httpx.AsyncClient, headers: Any, body: Any, echoed: str
) -> None:
    response = await client.post(CHAT, json={**BODY, **body}, headers=headers)
    assert response.headers["x-request-id"] == echoed
    assert echoed not in response.text
    response = await client.post(CHAT, json={**BODY, "request_id": "a b"})
    assert error_of(response.content)["param"] == "request_id"


async def test_a08_notes_of_the_caller_go_nowhere(
    mesh: FakeMesh, client: httpx.AsyncClient
) -> None:
    body = {**BODY, "user": "🙂", "metadata": {"a": "ключ"}}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200
    for start in (*mesh.tokenizer.starts, *mesh.decode.starts):
        assert "🙂" not in str(start)


async def test_a22_one_token_is_one_token(sdk: openai.AsyncOpenAI) -> None:
    for more in ({"max_tokens": 1}, {"max_completion_tokens": 1, "max_tokens": 5}):
        answer: Any = await sdk.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            **more,  # type: ignore[arg-type]
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a57_logprobs_are_of_the_text_that_is_returned(
    mesh: FakeMesh, client: httpx.AsyncClient, stream: bool
) -> None:
    mesh.decode.answer = "Grüße 🙂 end"
    body = {**BODY, "logprobs": True, "top_logprobs": 2, "stop": [" end"], "stream": stream}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    if stream:
        lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x]
        choices = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        content = [e for c in choices if c.get("logprobs") for e in c["logprobs"]["content"]]
    else:
        (choice,) = response.json()["choices"]
        text, content = choice["message"]["content"], choice["logprobs"]["content"]
    assert text == "Grüße 🙂"
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_a57_completions_tell_offsets_and_the_echo(
    mesh: FakeMesh, sdk: openai.AsyncOpenAI
) -> None:
    answer = await sdk.completions.create(
        model=MODEL, prompt="né", echo=True, logprobs=1, max_tokens=2
    )
    (choice,) = answer.choices
    assert choice.text == "né" + mesh.decode.answer[:2]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 1, 2, 3]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(isinstance(one, float) for one in logprobs.token_logprobs[1:])
