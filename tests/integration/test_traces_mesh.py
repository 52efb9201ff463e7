"""Spans, metrics and logs of the real services in one process, with simulated engines."""

import asyncio
import io
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from kvmesh.engine.batch_engine import BatchEngine
from kvmesh.engine.factory import EngineConfig
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.errors import OverloadedError
from kvmesh.host.config import ModelConfig
from kvmesh.telemetry import log_to
from kvmesh.testing.cluster import until
from kvmesh.testing.http import connected
from kvmesh.testing.mesh import Mesh, mesh, worker
from kvmesh.testing.spans import SpanLedger
from kvmesh.testing.tokenizer_folders import byte_level_folder
from kvmesh.types import Role
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.frontend.app import app as frontend_app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig
from services.prefill.app import app as prefill_app
from services.prefill.config import PrefillConfig
from services.router.app import app as router_app
from services.router.config import RouterConfig
from services.tokenizer.app import app as tokenizer_app
from services.tokenizer.config import TokenizerConfig

MODEL = "tiny"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "The capital of France is Paris, and the capital of Italy is Rome. " * 12
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

Samples = list[tuple[str, dict[str, str], float]]


@dataclass
class Real:
    mesh: Mesh
    client: httpx.AsyncClient
    ledger: SpanLedger
    address: str
    requests: list[str] = field(default_factory=list)

    def samples(self) -> Samples:
        return [
            (sample.name, sample.labels, sample.value)
            for page in self.pages()
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        ]

    def pages(self) -> list[str]:
        return [node.process.telemetry.render().decode() for node in self.mesh.nodes]

    def metric(self, name: str, **labels: str) -> float:
        return sum(
            value
            for found, of, value in self.samples()
            if found == name and all(of.get(key) == wanted for key, wanted in labels.items())
        )

    async def ask(self, path: str = TEXT, **more: Any) -> httpx.Response:
        prompt = {} if path == CHAT else {"prompt": "hello"}
        body = {"model": MODEL, "temperature": 0, "max_tokens": 8, **prompt, **more}
        return await self.client.post(path, json=body)

    async def leave(self, what: Callable[[], bool], **more: Any) -> None:
        """Send a request, and hang up when `what` is true."""
        async with connected(self.address) as raw:
            raw.post(TEXT, {"model": MODEL, "prompt": "hello", "max_tokens": 1500, **more})
            await until(what)

    async def idle(self) -> None:
        """Wait until nothing runs and nothing is held anywhere."""

        def settled() -> bool:
            running = any(node.process.gate.running for node in self.mesh.nodes)
            return not running and not self.metric("kvmesh_engine_ticket_blocks")

        await until(settled)
        await until(lambda: not self.ledger.open)


@asynccontextmanager
async def real(folder: Path, *, speed: float = 0.0, seconds: float = 60.0) -> AsyncIterator[Real]:
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    facts = {"vocab_size": size, "max_position_embeddings": 2048, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    sim = SimConfig(sample_from=10, latency=Latency(speed=speed))
    model = ModelConfig(path=folder, name=MODEL)
    engine = EngineConfig(name="sim", sim=sim)
    frontend = FrontendConfig(http=HttpConfig(port=0), limits=LimitsConfig(request_seconds=seconds))
    ledger = SpanLedger()
    async with mesh(spans=ledger) as running:
        await running.start(Role.TOKENIZER, tokenizer_app, TokenizerConfig(model=model))
        prefill = PrefillConfig(model=model, engine=engine)
        await running.start(Role.PREFILL, worker(prefill_app), prefill)
        decode = DecodeConfig(model=model, engine=engine)
        await running.start(Role.DECODE, worker(decode_app), decode)
        await running.start(Role.ROUTER, router_app, RouterConfig())
        node = await running.start(Role.FRONTEND, frontend_app, frontend)
        address = node.member.http_address
        async with httpx.AsyncClient(
            base_url=f"http://{address}", trust_env=False, timeout=60
        ) as client:
            one = Real(running, client, ledger, address)
            await until(lambda: _routable(one))
            await one.idle()
            ledger.ended.clear()
            yield one


async def _routable(one: Real) -> bool:
    """Return whether the router has heard from the workers, too."""
    return (await one.ask(max_tokens=1)).status_code == 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_level_folder(tmp_path / "model")


WORK = ["encode", "route", "engine.prefill", "engine.decode", "detokenize"]


async def test_each_process_ends_the_spans_of_each_ending(folder: Path) -> None:
    async with real(folder) as one:
        assert (await one.ask(prompt=LONG)).status_code == 200
        assert (await one.ask(prompt=LONG + "x", n=2, stop=["zq"])).status_code == 200
        assert (await one.ask(prompt=[99_999_999])).status_code == 400
        assert (await one.ask(prompt=LONG * 99)).status_code == 400
        await one.idle()
        names = one.ledger.names
        assert set(WORK) <= set(names)
        # Two requests, of which one has two answers; one prompt more was only encoded.
        assert names.count("detokenize") == 3
        assert one.ledger.open == []


async def test_clients_that_leave_end_every_span_in_every_process(folder: Path) -> None:
    async with real(folder, speed=1.0) as one:

        def decoding() -> bool:
            return one.metric("kvmesh_engine_running", role="decode") > 0

        for more in ({}, {"n": 3}, {"prompt": LONG}, {"stream": True}):
            await one.leave(decoding, **more)
            await one.idle()
        kinds = [
            dict(span.attributes or {}).get("error.type")
            for span in one.ledger.ended
            if span.name == "engine.decode"
        ]
        assert set(kinds) == {"CANCELLED"}
        assert one.metric("kvmesh_engine_finished_total", finish_reason="abort") == len(kinds)


async def test_a_full_engine_refuses_and_its_span_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OverloadedError("full")

    async with real(folder) as one:
        monkeypatch.setattr(BatchEngine, "submit", full)
        assert (await one.ask()).status_code == 429
        await one.idle()
        refused = [span for span in one.ledger.ended if span.name == "engine.decode"]
        assert refused
        assert {dict(s.attributes or {})["error.type"] for s in refused} == {"OVERLOADED"}
        finished = one.metric("kvmesh_engine_finished_total", finish_reason="error")
        assert finished == len(refused)


async def test_a_deadline_ends_every_span_in_every_process(folder: Path) -> None:
    async with real(folder, speed=1.0, seconds=0.5) as one:
        assert (await one.ask(max_tokens=2000)).status_code == 504
        await one.idle()
        (root,) = [s for s in one.ledger.ended if s.name == f"text_completion {MODEL}"]
        assert dict(root.attributes or {})["error.type"] == "DEADLINE_EXCEEDED"


async def test_a48_work_of_threads_and_of_shared_streams_keeps_its_parent(folder: Path) -> None:
    parents = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 31)]
    async with real(folder) as one:
        body = {"model": MODEL, "prompt": LONG, "max_tokens": 8}
        asks = [one.client.post(TEXT, json=body, headers={"traceparent": p}) for p in parents]
        assert {answer.status_code for answer in await asyncio.gather(*asks)} == {200}
        await one.idle()
    above = {
        "encode": "tokenize",
        "engine.prefill": "prefill",
        "engine.decode": "decode",
        "detokenize": f"text_completion {MODEL}",
    }
    by_id = {span.context.span_id: span for span in one.ledger.ended if span.context}
    seen: Counter[tuple[str, int]] = Counter()
    for span in one.ledger.ended:
        assert span.context is not None
        assert span.parent is not None
        assert span.parent.trace_id == span.context.trace_id
        if span.name in above:
            assert by_id[span.parent.span_id].name == above[span.name]
            seen[span.name, span.context.trace_id] += 1
    for name in ("encode", "engine.decode", "detokenize"):
        assert [seen[name, number] for number in range(1, 31)] == [1] * 30


async def test_engines_count_what_they_do(folder: Path) -> None:
    async with real(folder) as one:
        before = one.metric("kvmesh_engine_prefix_cache_queries_total")
        response = await one.ask(prompt=LONG)
        tokens = response.json()["usage"]["prompt_tokens"]
        await one.idle()
        queried = one.metric("kvmesh_engine_prefix_cache_queries_total", model=MODEL)
        assert queried - before == tokens
        response = await one.ask(prompt=LONG)
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        await one.idle()
        assert cached
        assert one.metric("kvmesh_engine_prefix_cache_hits_total", model=MODEL) == cached
        assert one.metric("kvmesh_cached_tokens_total", model=MODEL) == cached
        role = {"model": MODEL, "role": "decode"}
        assert one.metric("kvmesh_engine_completion_tokens_total", **role) >= 16
        assert one.metric("kvmesh_engine_finished_total", finish_reason="length", **role) == 3
        assert one.metric("kvmesh_engine_preemptions_total", **role) == 0
        assert one.metric("kvmesh_engine_total_blocks", **role) > 0
        assert 0 <= one.metric("kvmesh_engine_kv_usage", **role) <= 1
        assert one.metric("kvmesh_router_queue_seconds_count", model=MODEL) == 3


async def test_every_metric_is_in_the_documentation(folder: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    async with real(folder) as one:
        await one.ask(prompt=LONG, stream=True)
        await one.ask(n=0)
        await one.idle()
        names = {
            family.name + ("_total" if family.type == "counter" else "")
            for page in one.pages()
            for family in text_string_to_metric_families(page)
            if family.name.startswith(("kvmesh_", "gen_ai_"))
        }
    assert len(names) > 40
    assert sorted(name for name in names if f"`{name}`" not in text) == []


async def test_a41_gauges_fall_to_zero_without_further_traffic(folder: Path) -> None:
    count = 100
    async with real(folder, speed=1.0) as one:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 1500}
        tasks = [asyncio.create_task(one.client.post(TEXT, json=body)) for _ in range(count)]
        await until(lambda: one.metric("kvmesh_running", role="frontend") == count)
        await until(lambda: one.metric("kvmesh_engine_running") > 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await one.idle()
        for name in ("running", "waiting", "ticket_blocks", "ticket_bytes"):
            assert one.metric(f"kvmesh_engine_{name}") == 0, name
        for name in ("kvmesh_running", "kvmesh_router_waiting", "kvmesh_router_reservations"):
            assert one.metric(name) == 0, name
        await until(lambda: one.metric("kvmesh_engine_used_blocks") == 0)
        assert one.metric("kvmesh_engine_kv_usage") == 0
        assert one.metric("kvmesh_finished_total", finish_reason="abort") == count
        assert one.metric("kvmesh_requests_total", outcome="cancelled") == count


CANARY = "Zxqcanaryqxz"


def say(path: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return path, more


SPOKEN = [
    say(TEXT, prompt=CANARY),
    say(TEXT, prompt=CANARY * 900),
    say(TEXT, prompt=f"{CANARY} " * 30, stop=[CANARY], user=CANARY, suffix=None),
    say(TEXT, prompt=CANARY, metadata={CANARY: CANARY}),
    say(TEXT, prompt=[CANARY, 7]),
    say(TEXT, prompt={CANARY: CANARY}),
    say(TEXT, prompt=CANARY, temperature=CANARY),
    say(TEXT, prompt=CANARY, stop={CANARY: 1}),
    say(TEXT, prompt=CANARY, logit_bias={CANARY: 1}),
    say(TEXT, prompt=CANARY, **{CANARY: 1}),
    say(TEXT, prompt=CANARY, model=f"models/{CANARY}"),
    say(TEXT, prompt=CANARY, stream=True),
    say(TEXT, prompt=CANARY, echo=True, logprobs=2, max_tokens=0),
    say(CHAT, messages=[{"role": "user", "content": CANARY}]),
    say(CHAT, messages=[{"role": CANARY, "content": CANARY}]),
    say(CHAT, messages=[{"role": "user", "content": {CANARY: CANARY}}]),
    say(CHAT, messages=[{"role": "user", "content": CANARY, CANARY: CANARY}]),
    say(CHAT, messages=[{"role": "user", "content": CANARY}], tools=[{"type": CANARY}]),
    say(CHAT, messages=CANARY),
    say(CHAT, messages=[{"role": "user", "content": CANARY}], chat_template="{{ 1/0 }}" + CANARY),
    say(
        CHAT,
        messages=[{"role": "user", "content": CANARY}],
        chat_template_kwargs={CANARY: CANARY},
    ),
    say("/tokenize", prompt=CANARY),
    say("/detokenize", tokens=[CANARY]),
]


async def test_prompts_are_in_no_log_no_span_and_no_metric(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for client in ("httpx", "httpcore"):
        monkeypatch.setattr(logging.getLogger(client), "disabled", True)
    for name in [n for n in logging.root.manager.loggerDict if n.startswith("httpcore.")]:
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    seen = io.StringIO()
    with log_to(seen, role="all", level="debug", json_lines=False):
        async with real(folder) as one:
            headers = {
                "x-request-id": CANARY,
                "traceparent": CANARY,
                "tracestate": f"a={CANARY}",
                "baggage": f"a={CANARY}",
                "authorization": f"Bearer {CANARY}",
                "user-agent": CANARY,
            }
            for path, more in SPOKEN:
                body = {"model": MODEL, "max_tokens": 4, **more}
                response = await one.client.post(path, json=body, headers=headers)
                assert response.status_code < 500, response.text
            broken = f'{{"prompt": "{CANARY}", '.encode()
            kind = {"content-type": "application/json"}
            for raw in (broken, broken + b"\xff", CANARY.encode()):
                response = await one.client.post(TEXT, content=raw, headers=kind)
                assert response.status_code == 400
            await one.client.get(f"/{CANARY}?{CANARY}", headers=headers)
            await break_engines(one, monkeypatch)
            await one.idle()
            pages, spans = "".join(one.pages()), one.ledger.text()
    logged = seen.getvalue()
    assert "Traceback" in logged or "RuntimeError" in logged
    for text in (logged, spans, pages):
        assert CANARY not in text, text[max(0, text.find(CANARY) - 600) :][:800]
    # Not as token ids, either.
    ids = ", ".join(map(str, CANARY.encode()[:4]))
    assert ids not in logged + spans


async def break_engines(one: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a request fail in ways that nobody expected, with the prompt in what is raised."""

    def submit(*_: Any) -> None:
        raise RuntimeError(f"can't serve {CANARY}")

    async def prefill(*_: Any) -> None:
        raise ValueError(f"can't compute {CANARY}") from KeyError(CANARY)

    monkeypatch.setattr(BatchEngine, "submit", submit)
    monkeypatch.setattr(BatchEngine, "prefill", prefill)
    for prompt in (CANARY, f"{CANARY} {LONG}"):
        response = await one.ask(prompt=prompt)
        assert response.status_code >= 500
        assert CANARY not in response.text
    monkeypatch.undo()
