"""The clients that people have, against a mesh of real processes on the simulated engine."""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from kvmesh.testing.cluster import Cluster, cluster, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODEL = "tiny"
KEY = "a-key"
MESSAGES: Any = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is the capital of France?"},
]
SLOW = ("--set", "engine.sim.latency.decode_us_per_step=20000")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    state = tmp_path_factory.mktemp("mesh") / "state"
    fast = ("--set", "engine.sim.latency.speed=0")
    keys = ("--set", f"frontend:http.api_keys={KEY}")
    async with cluster(state, "--engine", "sim", *fast, *keys) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sdk(mesh: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with package(mesh) as one:
        yield one


def package(mesh: Cluster, **more: Any) -> openai.AsyncOpenAI:
    options = {"api_key": KEY, "max_retries": 0, "timeout": 60, **more}
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", **options)


# The openai package


async def test_openai_chat_is_the_same_streamed_and_not(sdk: openai.AsyncOpenAI) -> None:
    wanted: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = await sdk.chat.completions.create(**wanted)
    stream = await sdk.chat.completions.create(
        **wanted, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    (choice,) = whole.choices
    assert choice.message.content
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1


async def test_openai_stream_helper_puts_the_answer_together(sdk: openai.AsyncOpenAI) -> None:
    wanted: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = (await sdk.chat.completions.create(**wanted)).choices[0].message.content or ""
    stop = whole[6:9]
    async with sdk.chat.completions.stream(**wanted, stop=[stop], logprobs=True) as stream:
        kinds = {event.type async for event in stream}
        final = (await stream.get_final_completion()).choices[0]
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.finish_reason == "stop"
    assert final.message.content == whole[: whole.index(stop)]
    assert final.logprobs is not None
    tokens = [token.token for token in final.logprobs.content or ()]
    assert "".join(tokens).startswith(final.message.content or "")


async def test_openai_choices_and_log_probabilities(sdk: openai.AsyncOpenAI) -> None:
    wanted: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "n": 3, "seed": 7}
    wanted |= {"temperature": 1, "logprobs": True, "top_logprobs": 4}
    whole = await sdk.chat.completions.create(**wanted)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) > 1
    for choice in whole.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert len(tokens) == 6
        assert "".join(token.token for token in tokens) == choice.message.content
        for token in tokens:
            assert bytes(token.bytes or ()).decode() == token.token
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 4
            assert math.isclose(
                sum(math.exp(top.logprob) for top in token.top_logprobs), 1, abs_tol=0.5
            )
    stream = await sdk.chat.completions.create(**wanted, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 18


async def test_openai_completions_of_text_ids_and_lists(sdk: openai.AsyncOpenAI) -> None:
    wanted: Any = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    whole = await sdk.completions.create(**wanted, prompt="Once upon", echo=True, logprobs=2)
    (choice,) = whole.choices
    assert choice.text.startswith("Once upon")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    assert (choice.logprobs.token_logprobs or [0])[0] is None
    several = await sdk.completions.create(**wanted, prompt=["one", "two"], n=2)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text
    ids = await sdk.completions.create(**wanted, prompt=[[30, 31], [32]])
    assert len(ids.choices) == 2
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    stream = await sdk.completions.create(**wanted, prompt="one", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == several.choices[0].text


async def test_openai_raw_events_end_with_done(sdk: openai.AsyncOpenAI) -> None:
    wanted: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True}
    headers = {"x-request-id": "mine-1"}
    async with sdk.chat.completions.with_streaming_response.create(
        **wanted, extra_headers=headers
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"] == "mine-1"
        lines = [line async for line in response.iter_lines()]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert all(line.startswith("data: ") for line in lines if line)
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in events[:-1])
    raw = await sdk.chat.completions.with_raw_response.create(**{**wanted, "stream": False})
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content


async def test_openai_lists_and_retrieves_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize(
    ("wanted", "kind", "code", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_argument", "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_argument", "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "invalid_argument", "messages"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"extra_body": {"no_such": 1}}, openai.BadRequestError, "invalid_argument", "no_such"),
        ({"extra_headers": {"authorization": "Bearer x"}}, openai.AuthenticationError, None, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_raises_the_class_of_each_error(
    sdk: openai.AsyncOpenAI,
    wanted: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    body: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": stream}
    with pytest.raises(kind) as caught:
        await sdk.chat.completions.create(**{**body, **wanted})
    assert caught.value.code == (code or "invalid_api_key")
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert isinstance(caught.value.body, dict)


async def test_openai_times_out_and_retries(tmp_path: Path) -> None:
    async with cluster(tmp_path / "state", "--engine", "sim", *SLOW) as mesh:
        wanted: Any = {"model": MODEL, "messages": MESSAGES}
        async with package(mesh, timeout=0.5) as hasty:
            with pytest.raises(openai.APITimeoutError):
                await hasty.chat.completions.create(**wanted, max_tokens=2000)
        (decode,) = await mesh.of("decode")
        await until(lambda: idle(mesh))  # the one that gave up has left nothing
        os.kill(decode["pid"], signal.SIGKILL)
        async with package(mesh) as once:
            with pytest.raises(openai.InternalServerError) as caught:
                await once.chat.completions.create(**wanted, max_tokens=2)
        assert (caught.value.status_code, caught.value.type) == (503, "server_error")
        async with package(mesh, max_retries=20) as patient:
            asking = asyncio.create_task(
                patient.chat.completions.with_raw_response.create(**wanted, max_tokens=2)
            )
            folder = json.loads((mesh.state / "cluster.json").read_text())
            await mesh.start(
                "decode",
                discovery_kind="local",
                discovery_directory=str(mesh.state / "members"),
                model_path=folder["model_path"],
                engine_name="sim",
            )
            raw = await asking
        assert raw.retries_taken
        assert raw.parse().choices[0].finish_reason == "length"


async def idle(mesh: Cluster) -> bool:
    """Whether no worker holds anything for anybody."""
    workers = [*await mesh.of("prefill"), *await mesh.of("decode")]
    return all(
        w["load"] and not (w["load"]["running"] or w["load"]["used_blocks"]) for w in workers
    )


# LangChain


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lang(mesh: Cluster) -> AsyncIterator[dict[str, Any]]:
    """What every model of LangChain gets. Its own connections would never be closed."""
    with httpx.Client(trust_env=False) as plain:
        async with httpx.AsyncClient(trust_env=False) as waiting:
            yield {
                "model": MODEL,
                "base_url": f"{mesh.url}/v1",
                "api_key": KEY,
                "max_retries": 0,
                "temperature": 0,
                "max_tokens": 12,
                "http_client": plain,
                "http_async_client": waiting,
            }


@pytest.fixture
def chain(lang: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**lang, stream_usage=True)


async def test_langchain_invokes_and_streams_the_same(chain: ChatOpenAI) -> None:
    said = [SystemMessage("You are terse."), HumanMessage("What is the capital of France?")]
    whole = await chain.ainvoke(said)
    assert isinstance(whole, AIMessage)
    assert whole.content
    usage = whole.usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == 12
    assert usage["total_tokens"] == usage["input_tokens"] + 12
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.response_metadata["model_name"] == MODEL
    total: Any = None
    async for chunk in chain.astream(said):
        total = chunk if total is None else total + chunk
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == 12
    assert total.usage_metadata["input_tokens"] == usage["input_tokens"]
    again = await asyncio.to_thread(chain.invoke, said)
    assert again.content == whole.content


async def test_langchain_batches(chain: ChatOpenAI) -> None:
    said = [f"Question {n}" for n in range(8)]
    alone = [(await chain.ainvoke(one)).content for one in said]
    assert [answer.content for answer in await chain.abatch(said)] == alone
    assert len(set(alone)) > 1


async def test_langchain_gets_log_probabilities_and_stops(chain: ChatOpenAI) -> None:
    scored = await chain.bind(logprobs=True, top_logprobs=2).ainvoke("Hi")
    tokens = scored.response_metadata["logprobs"]["content"]
    assert len(tokens) == 12
    assert "".join(token["token"] for token in tokens) == scored.content
    text = str(scored.content)
    stop = text[4:6]
    stopped = await chain.bind(stop=[stop]).ainvoke("Hi")
    assert stopped.content == text[: text.index(stop)]
    assert stopped.response_metadata["finish_reason"] == "stop"
    parts = [chunk.content async for chunk in chain.bind(stop=[stop]).astream("Hi")]
    assert "".join(map(str, parts)) == stopped.content


async def test_langchain_raises_the_packages_errors(chain: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await chain.bind(temperature=-1).ainvoke("Hi")
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await chain.bind(model="nobody").ainvoke("Hi")


async def test_langchain_completes_text(lang: dict[str, Any]) -> None:
    plain = OpenAI(**lang)
    whole = await plain.ainvoke("Once upon")
    assert whole
    assert "".join([part async for part in plain.astream("Once upon")]) == whole
