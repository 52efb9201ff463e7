"""Cases that need real processes: workers killed, overload, messages of many megabytes."""

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.testing.cluster import Cluster, cluster, until

SLOW_STEPS = ("--set", "engine.sim.latency.decode_us_per_step=20000")
FAST = ("--set", "engine.sim.latency.speed=0")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


async def model_of(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def idle(mesh: Cluster) -> bool:
    workers = [*await mesh.of("prefill"), *await mesh.of("decode")]
    loads = [w["load"] for w in workers]
    return all(load and not load["running"] + load["used_blocks"] for load in loads)


def body(model: str, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": "tell me a long story",
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


@pytest.mark.parametrize("prefill", ["0", "1"])
async def test_a03_a_decode_worker_that_is_killed_in_mid_stream(state: Path, prefill: str) -> None:
    async with (
        cluster(state, "--engine", "sim", "--prefill", prefill, *SLOW_STEPS) as mesh,
        mesh.client() as client,
    ):
        wanted = body(await model_of(client), max_tokens=500, stream=True, prompt="story " * 80)
        (decode,) = await mesh.of("decode")
        async with client.stream("POST", "/v1/completions", json=wanted) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            for _ in range(20):  # each event is a line, and an empty one
                await anext(lines)
            os.kill(decode["pid"], signal.SIGKILL)
            rest = [line async for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert set(error) == {"message", "type", "param", "code"}
        assert "[DONE]" not in "".join(rest)
        assert '"finish_reason":"' not in "".join(rest)
        (frontend,) = await mesh.of("frontend")
        assert (await mesh.metrics(frontend))["kvmesh_request_errors_total"] == 1


CONCURRENT = (
    *("--set", "engine.sim.handoff=concurrent"),
    *("--set", "engine.sim.max_batch_tokens=64"),
    *("--set", "engine.sim.latency.prefill_us_per_token=5000"),
)


async def test_a_prefill_worker_that_is_killed_while_decode_waits_for_it(state: Path) -> None:
    flags = ("--engine", "sim", "--prefill", "2", *CONCURRENT)
    async with cluster(state, *flags) as mesh, mesh.client() as client:
        wanted = body(await model_of(client), max_tokens=40, prompt="story " * 80)
        whole = (await client.post("/v1/completions", json=wanted)).json()
        await until(lambda: idle(mesh))
        wanted["prompt"] = "other " * 80  # nothing of it is cached
        asking = asyncio.create_task(client.post("/v1/completions", json=wanted))

        async def beside() -> int | None:
            (decode,) = await mesh.of("decode")
            busy = [p["pid"] for p in await mesh.of("prefill") if p["load"]["running"]]
            return busy[0] if busy and decode["load"]["running"] else None

        os.kill(await until(beside), signal.SIGKILL)
        answer = await asking
        assert answer.status_code == 200, answer.text
        again = (await client.post("/v1/completions", json=wanted)).json()
        assert answer.json()["choices"] == again["choices"] != whole["choices"]
        await until(lambda: idle(mesh))
        (frontend,) = await mesh.of("frontend")
        metrics = await mesh.metrics(frontend)
        assert metrics["kvmesh_retries_total"] == 1
        assert metrics.get("kvmesh_request_errors_total", 0) == 0


SEEDED = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}


@pytest.mark.parametrize(("engine", "prefill"), [("sim", "0"), ("sim", "1"), ("torch", "1")])
async def test_a_stream_outlives_its_decode_workers(state: Path, engine: str, prefill: str) -> None:
    flags = ("--engine", engine, "--prefill", prefill, "--decode", "3")
    paced = SLOW_STEPS if engine == "sim" else ()
    async with cluster(state, *flags, *paced) as mesh, mesh.client() as client:
        model = await model_of(client)
        pids = {worker["id"]: worker["pid"] for worker in await mesh.of("decode")}
        explained = {"x-kvmesh-explain": "1"}
        for knobs in ({}, SEEDED):
            wanted = body(model, max_tokens=80, prompt="story " * 80, **knobs)
            whole = (await client.post("/v1/completions", json=wanted)).json()
            asked = {**wanted, "stream": True, "stream_options": {"include_usage": True}}
            async with client.stream(
                "POST", "/v1/completions", json=asked, headers=explained
            ) as response:
                lines = response.aiter_lines()
                seen = [await anext(lines) for _ in range(20)]
                os.kill(pids[response.headers["x-kvmesh-decode-worker"]], signal.SIGKILL)
                seen += [line async for line in lines]
            assert [line for line in seen if line][-1] == "data: [DONE]"
            events = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
            text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
            assert text == whole["choices"][0]["text"]
            assert events[-1]["usage"]["completion_tokens"] == 80
        (frontend,) = await mesh.of("frontend")
        metrics = await mesh.metrics(frontend)
        assert metrics.get("kvmesh_request_errors_total", 0) == 0
        assert metrics["kvmesh_migrations_total"] == 2


async def test_streams_outlive_a_tokenizer(state: Path) -> None:
    flags = ("--engine", "sim", "--prefill", "0", "--tokenizer", "2")
    async with cluster(state, *flags, *SLOW_STEPS) as mesh, mesh.client() as client:
        model = await model_of(client)
        victim, _ = await mesh.of("tokenizer")
        begun = asyncio.Semaphore(0)

        async def streamed(wanted: dict[str, Any]) -> tuple[str, list[str]]:
            text, tokens = "", []
            async with client.stream("POST", "/v1/completions", json=wanted) as response:
                async for line in response.aiter_lines():
                    assert '"error"' not in line
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        text += choice["text"]
                        tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else ()
                        begun.release()
            return text, tokens

        asked = [
            body(model, prompt=f"story {number}", max_tokens=60, stream=True, **more)
            for number, more in enumerate(({}, {"logprobs": 2}, {"stop": ["zzz"]}, {"echo": True}))
        ]
        alone = [await streamed(wanted) for wanted in asked]
        begun = asyncio.Semaphore(0)
        together = [asyncio.create_task(streamed(wanted)) for wanted in asked]
        for _ in range(20):
            await begun.acquire()
        os.kill(victim["pid"], signal.SIGKILL)
        assert await asyncio.gather(*together) == alone
        (frontend,) = await mesh.of("frontend")
        assert (await mesh.metrics(frontend))["kvmesh_migrations_total"] >= 1


async def test_a03_with_nobody_left_the_status_says_so(state: Path) -> None:
    async with (
        cluster(state, "--engine", "sim", "--prefill", "0", *SLOW_STEPS) as mesh,
        mesh.client() as client,
    ):
        wanted = body(await model_of(client), max_tokens=5, stream=True)
        (decode,) = await mesh.of("decode")
        os.kill(decode["pid"], signal.SIGKILL)
        response = await client.post("/v1/completions", json=wanted)
        assert response.status_code == 503
        assert set(response.json()) == {"error"}


async def test_a06_a_stop_string_ends_the_text_and_the_work(state: Path) -> None:
    async with (
        cluster(state, "--engine", "sim", "--prefill", "1", *FAST) as mesh,
        mesh.client() as client,
    ):
        wanted = body(await model_of(client), max_tokens=400, prompt="story " * 80)
        whole = (await client.post("/v1/completions", json=wanted)).json()
        text = whole["choices"][0]["text"]
        middle = len(text) // 2
        for size in (1, 3, 9):
            stop = text[middle : middle + size]
            expected = text[: text.index(stop)]
            got = (await client.post("/v1/completions", json={**wanted, "stop": [stop]})).json()
            (choice,) = got["choices"]
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
            assert choice["stop_reason"] == stop
            assert got["usage"]["completion_tokens"] < 400
            streamed = await client.post(
                "/v1/completions", json={**wanted, "stop": [stop], "stream": True}
            )
            events = [
                json.loads(event.removeprefix("data: "))
                for event in streamed.text.split("\n\n")
                if event and "[DONE]" not in event
            ]
            assert "".join(e["choices"][0]["text"] for e in events) == expected
        await until(lambda: idle(mesh))


async def test_a57_choices_with_logprobs_through_prefill_and_decode(state: Path) -> None:
    async with (
        cluster(state, "--engine", "sim", "--prefill", "1", *FAST) as mesh,
        mesh.client() as client,
    ):
        prompt = "story " * 80
        wanted = body(await model_of(client), max_tokens=40, n=3, logprobs=2, seed=5)
        wanted |= {"prompt": [prompt, "x " * 60], "temperature": 1}
        got = (await client.post("/v1/completions", json=wanted)).json()
        assert [choice["index"] for choice in got["choices"]] == list(range(6))
        assert len({choice["text"] for choice in got["choices"]}) > 3
        assert got["usage"]["completion_tokens"] == 6 * 40
        for choice in got["choices"]:
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == 40
            assert all(-9999 <= value <= 0 for value in logprobs["token_logprobs"])
            assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        received = [w["load"]["received_bytes"] for w in await mesh.of("decode")]
        assert all(received), "prefill was never remote"
        await until(lambda: idle(mesh))


async def test_a24_megabytes_are_answered_by_what_is_wrong_with_them(state: Path) -> None:
    async with (
        cluster(state, "--engine", "sim", "--prefill", "1", *FAST) as mesh,
        mesh.client() as client,
    ):
        model = await model_of(client)
        text = await client.post("/v1/completions", json=body(model, prompt="a" * (4 * 2**20 + 1)))
        assert text.status_code == 413
        assert text.json()["error"]["code"] == "request_too_large"
        digits = await client.post("/v1/completions", json=body(model, prompt=[5] * 1_100_000))
        assert digits.status_code == 400
        assert digits.json()["error"]["code"] == "context_length_exceeded"
        large = await client.post("/v1/completions", json=body(model, prompt="a" * 17 * 2**20))
        assert large.status_code == 413
        assert large.json()["error"]["code"] == "request_too_large"
        many = body(model, max_tokens=2000, n=4, logprobs=20)
        answer = (await client.post("/v1/completions", json=many)).json()
        assert [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [2000] * 4
        await until(lambda: idle(mesh))


@pytest.mark.parametrize("stream", [False, True])
async def test_a59_what_is_too_much_is_turned_away_at_once(state: Path, stream: bool) -> None:
    limits = ("--set", "routing.max_requests_per_worker=4", "--set", "queue.max_requests=8")
    async with (
        cluster(state, "--engine", "sim", "--prefill", "0", *SLOW_STEPS, *limits) as mesh,
        mesh.client() as client,
    ):
        wanted = body(await model_of(client), max_tokens=50, stream=stream)
        (frontend,) = await mesh.of("frontend")
        tasks = [
            asyncio.create_task(client.post("/v1/completions", json=wanted)) for _ in range(64)
        ]
        while not all(task.done() for task in tasks):
            assert (await client.get("/health")).status_code == 200
            assert "kvmesh_running" in await mesh.metrics(frontend)
            await asyncio.wait(tasks, timeout=0.2)
        answers = [task.result() for task in tasks]
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses[200] == 12
        assert statuses[429] == 52
        for answer in answers:
            if answer.status_code == 429:
                assert set(answer.json()) == {"error"}
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        await until(lambda: idle(mesh))
