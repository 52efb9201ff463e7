"""What routers have counted for a request is gone with it, however it ended.

Real services and gRPC in one process: two routers, two frontends, simulated engines. One
model works; the decode worker of the other dies within its first requests.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

import services.router.app
from kvmesh.engine.factory import EngineConfig
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.faults import Faults
from kvmesh.engine.sim.latency import Latency
from kvmesh.host.config import ModelConfig
from kvmesh.rpc.clients import PlanCall
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.testing.cluster import until
from kvmesh.testing.mesh import Mesh, Node, mesh, worker
from kvmesh.testing.tokenizer_folders import byte_level_folder
from kvmesh.types import Member, Role, Worker, WorkerNews
from kvmesh.v1 import generation_pb2, inference_pb2, inference_pb2_grpc
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.frontend.app import app as frontend_app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig
from services.prefill.app import app as prefill_app
from services.prefill.config import PrefillConfig
from services.router.app import app as router_app
from services.router.config import RouterConfig
from services.router.planner import RoutingConfig
from services.router.reservations import Held, Ledger, Life, Reservation
from services.router.state import Applied, Fleet
from services.tokenizer.app import app as tokenizer_app
from services.tokenizer.config import TokenizerConfig

pytestmark = pytest.mark.timeout(240)

WORKS, FAILS = "works", "fails"
REQUESTS = 500
AT_ONCE = 24
PER_WORKER = 6
"""Requests on one worker: fewer than come at once, so that some wait in line."""
SHORT_SECONDS = 0.25
"""The deadline of requests that run into it."""


@dataclass
class Seen:
    """All that was wrong with a figure at any time, and the routers' books as they are now."""

    wrong: list[str] = field(default_factory=list)
    ledgers: list["CheckedLedger"] = field(default_factory=list)
    fleets: list["CheckedFleet"] = field(default_factory=list)
    updates: int = 0
    remote: int = 0


class CheckedLedger(Ledger):
    """Notes every figure that is negative after a change."""

    seen: Seen

    def __init__(self) -> None:
        super().__init__()
        self.touched: dict[int, Held] = {}
        self.seen.ledgers.append(self)

    def reserve(
        self, decode: Life, decode_blocks: int, prefill: Life | None, prefill_blocks: int
    ) -> Reservation:
        reservation = super().reserve(decode, decode_blocks, prefill, prefill_blocks)
        self.seen.remote += prefill is not None
        self._look(reservation)
        return reservation

    def prefilled(self, reservation: Reservation) -> None:
        super().prefilled(reservation)
        self._look(reservation)

    def release(self, reservation: Reservation) -> None:
        super().release(reservation)
        self._look(reservation)

    def _look(self, reservation: Reservation) -> None:
        for held in (reservation.decode_held, reservation.prefill_held):
            self.touched[id(held)] = held
            figures = (held.requests, held.present, held.decode_blocks, held.prefill_blocks)
            if min(figures) < 0 or self.active < 0:
                self.seen.wrong.append(f"{reservation.decode}: {figures}")


class CheckedFleet(Fleet):
    """Notes every figure about others that is negative after a report."""

    seen: Seen

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen.fleets.append(self)

    def update(self, members: Iterable[Member]) -> None:
        self.seen.updates += 1
        super().update(members)

    def apply(self, life: Life, news: WorkerNews) -> Applied:
        applied = super().apply(life, news)
        for each in self.workers():
            if each.others < 0 or each.other_blocks < 0 or each.cached_blocks() < 0:
                self.seen.wrong.append(f"{each.id}: {each.others}, {each.other_blocks}")
        return applied


@dataclass
class Rig:
    """The mesh, its clients, and what its routers have counted."""

    mesh: Mesh
    rest: httpx.AsyncClient
    rest_short: httpx.AsyncClient
    grpc: Any
    seen: Seen
    start_worker: Callable[[], Awaitable[Node]]
    endings: Counter[str] = field(default_factory=Counter)

    def left(self) -> dict[str, float]:
        """Every figure that is not zero, by name."""
        found: dict[str, float] = {}
        for at, ledger in enumerate(self.seen.ledgers):
            found[f"router {at} reservations"] = ledger.active
            found[f"router {at} lives"] = len(ledger.lives())
            for held in ledger.touched.values():
                found[f"router {at} requests"] = abs(held.requests) + abs(held.present)
                found[f"router {at} blocks"] = abs(held.decode_blocks) + abs(held.prefill_blocks)
        for at, fleet in enumerate(self.seen.fleets):
            for each in fleet.workers():
                load = each.load
                busy = load.running + load.waiting + load.used_blocks + load.ticket_blocks
                found |= {
                    f"router {at} others on {each.id}": each.others,
                    f"router {at} others' blocks on {each.id}": each.other_blocks,
                    f"router {at} load of {each.id}": busy,
                }
            for index in fleet.indexes():
                found[f"router {at} expected blocks"] = index.expected
        for node in self.mesh.nodes:
            found[f"{node.member.id} requests"] = node.process.gate.running
            shown = samples(node)
            for name in ("reservations", "waiting", "reserved_requests", "reserved_blocks"):
                found[f"{node.member.id} {name}"] = shown.get(f"kvmesh_router_{name}", 0)
        return {name: count for name, count in found.items() if count}


def samples(node: Node) -> dict[str, float]:
    """A process's metrics, labels summed up, by name."""
    sums: dict[str, float] = {}
    for line in node.process.telemetry.render().decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + abs(float(value))
    return sums


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every router that is built keeps checked books."""
    noted = Seen()
    ledger = type("NotingLedger", (CheckedLedger,), {"seen": noted})
    fleet = type("NotingFleet", (CheckedFleet,), {"seen": noted})
    monkeypatch.setattr(services.router.app, "Ledger", ledger)
    monkeypatch.setattr(services.router.app, "Fleet", fleet)
    return noted


@asynccontextmanager
async def rig(folder: Path, seen: Seen) -> AsyncIterator[Rig]:
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    facts = {"vocab_size": size, "max_position_embeddings": 4096, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    latency = Latency(prefill_us_per_token=500)

    def engine(**faults: int) -> EngineConfig:
        sim = SimConfig(sample_from=10, latency=latency, lease_seconds=3, faults=Faults(**faults))
        return EngineConfig(name="sim", sim=sim)

    async with mesh() as running, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            routing = RoutingConfig(max_requests_per_worker=PER_WORKER)
            await running.start(Role.ROUTER, router_app, RouterConfig(routing=routing))
        for name, broken in ((WORKS, {}), (FAILS, {"crash_after_steps": 40})):
            model = ModelConfig(path=folder, name=name)
            await running.start(Role.TOKENIZER, tokenizer_app, TokenizerConfig(model=model))
            prefill = PrefillConfig(model=model, engine=engine())
            await running.start(Role.PREFILL, worker(prefill_app), prefill)
            decode = DecodeConfig(model=model, engine=engine(**broken))
            await running.start(Role.DECODE, worker(decode_app), decode)
        good = DecodeConfig(model=ModelConfig(path=folder, name=WORKS), engine=engine())

        async def start_worker() -> Node:
            return await running.start(Role.DECODE, worker(decode_app), good)

        await start_worker()
        clients = []
        for seconds in (60.0, SHORT_SECONDS):
            config = FrontendConfig(
                http=HttpConfig(port=0), limits=LimitsConfig(request_seconds=seconds)
            )
            node = await running.start(Role.FRONTEND, frontend_app, config)
            url = f"http://{node.member.http_address}"
            client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=60)
            clients.append(await stack.enter_async_context(client))
            if seconds == SHORT_SECONDS:
                continue
            member = node.member
            peer = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
            stack.push_async_callback(peer.aclose)
            stub: Any = inference_pb2_grpc.InferenceServiceStub(peer.channel)
        one = Rig(running, *clients, stub, seen, start_worker)
        await until(lambda: _routable(one))
        yield one


async def _routable(one: Rig) -> bool:
    """Whether both routers get requests and have heard from all workers."""
    workers = [w for fleet in one.seen.fleets for w in fleet.workers()]
    body = {"model": WORKS, "prompt": "hi", "max_tokens": 1}
    answer = await one.rest.post("/v1/completions", json=body)
    return answer.status_code == 200 and len(workers) == 10 and all(w.routable for w in workers)


# The five endings, each over both of the public APIs


async def normal(one: Rig, api: str, rng: random.Random) -> None:
    async with asked(one, api, prompt(rng), rng.randint(1, 20)) as pieces:
        assert [piece async for piece in pieces]


async def abort_first(one: Rig, api: str, rng: random.Random) -> None:
    """Leave at a random point before the first token: in the queue, in prefill."""
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(rng.uniform(0.0, 0.06)),
            asked(one, api, prompt(rng, 300), 500) as pieces,
        ):
            async for _ in pieces:
                raise AssertionError("a token came before the prompt can have been computed")


async def abort_middle(one: Rig, api: str, rng: random.Random) -> None:
    wanted = rng.randint(1, 5)
    async with asked(one, api, prompt(rng), 2000) as pieces:
        async for _ in pieces:
            wanted -= 1
            if not wanted:
                return
    raise AssertionError("it ended too early")


async def worker_error(one: Rig, api: str, rng: random.Random) -> None:
    """What happens to requests once their worker is broken, and before."""
    failed = await failure(one, api, prompt(rng), rng.randint(30, 60), model=FAILS)
    one.endings[f"{api} worker error"] += bool(failed)
    assert failed in ("", "INTERNAL", "UNAVAILABLE", "engine_failed", "unavailable")


async def deadline(one: Rig, api: str, rng: random.Random) -> None:
    failed = await failure(one, api, prompt(rng), 2000, short=True)
    assert failed in ("DEADLINE_EXCEEDED", "deadline_exceeded")


ENDINGS = (normal, abort_first, abort_middle, worker_error, deadline)


class FailedError(Exception):
    """A request failed; `what` is the error's code."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


async def failure(one: Rig, api: str, text: str, tokens: int, **more: Any) -> str:
    """Read a request to its end; return the code that it failed with, "" if it did not."""
    try:
        async with asked(one, api, text, tokens, **more) as pieces:
            async for _ in pieces:
                pass
    except FailedError as failed:
        return failed.what
    return ""


def prompt(rng: random.Random, words: int = 0) -> str:
    """A prompt of its own, short enough for decode or long enough for prefill."""
    count = words or rng.choice((4, 80))
    return "".join(rng.choices("abcdefghijklmnop", k=8)) + " word" * count


@asynccontextmanager
async def asked(
    one: Rig, api: str, text: str, tokens: int, *, model: str = WORKS, short: bool = False
) -> AsyncIterator[AsyncIterator[str]]:
    """Send a request; yield its text as it comes. Leaving cancels it. Raises `FailedError`."""
    ask = _asked_rest if api == "rest" else _asked_grpc
    async with contextlib.aclosing(ask(one, text, tokens, model, short)) as pieces:
        yield pieces


async def _asked_rest(one: Rig, text: str, tokens: int, model: str, short: bool) -> Any:
    client = one.rest_short if short else one.rest
    body = {"model": model, "prompt": text, "max_tokens": tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise FailedError(json.loads(await response.aread())["error"]["code"])
        async for line in response.aiter_lines():
            if '"error"' in line:
                raise FailedError(json.loads(line.removeprefix("data: "))["error"]["code"])
            if line.startswith("data: {"):
                yield line


async def _asked_grpc(one: Rig, text: str, tokens: int, model: str, short: bool) -> Any:
    given = inference_pb2.GenerateInput(
        text=text, sampling=generation_pb2.SamplingParams(max_tokens=tokens)
    )
    request = inference_pb2.StreamGenerateRequest(model=f"models/{model}", input=given)
    call = one.grpc.StreamGenerate(request, timeout=SHORT_SECONDS if short else 60)
    try:
        async for response in call:
            yield response.text
    except grpc.aio.AioRpcError as error:
        raise FailedError(error.code().name) from error
    finally:
        call.cancel()


async def storm(one: Rig, requests: int) -> None:
    """Send requests of all endings in a random order, half of them over each API."""
    rng = random.Random(14)
    kinds = [
        (ending, api)
        for ending in ENDINGS
        for api in ("rest", "grpc")
        for _ in range(requests // 10)
    ]
    rng.shuffle(kinds)
    room = asyncio.Semaphore(AT_ONCE)

    async def run(number: int, ending: Any, api: str) -> None:
        async with room:
            await ending(one, api, random.Random(number))
            one.endings[f"{api} {ending.__name__}"] += 1

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(number, *kind)) for number, kind in enumerate(kinds)]
        await tasks[len(tasks) // 3]
        await health_ticks(one)
        # Discovery tells of a change: a worker comes and, with requests on it, goes.
        newcomer = await one.start_worker()
        await tasks[len(tasks) // 2]
        one.mesh.nodes.remove(newcomer)
        await newcomer.drain()
        await health_ticks(one)


async def health_ticks(one: Rig) -> None:
    """Ask every process how it is, as an orchestrator would."""
    for node in one.mesh.nodes:
        async with grpc.aio.insecure_channel(node.member.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await one.rest.get("/health")).status_code == 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_level_folder(tmp_path / "model")


async def test_a14_requests_ended_in_five_ways_leave_every_figure_at_zero(
    folder: Path, seen: Seen
) -> None:
    async with rig(folder, seen) as one:
        before = seen.updates
        await storm(one, REQUESTS)
        try:
            await until(lambda: not one.left(), 20)
        except TimeoutError:
            assert one.left() == {}
        assert seen.wrong == []
        for ending in ENDINGS:
            assert one.endings[f"rest {ending.__name__}"] == REQUESTS // 10
            assert one.endings[f"grpc {ending.__name__}"] == REQUESTS // 10
        assert min(one.endings[f"{api} worker error"] for api in ("rest", "grpc")) > 20
        assert seen.updates - before >= 4
        assert seen.remote > 50
        for node in one.mesh.nodes:
            if node.member.role is Role.ROUTER:
                assert samples(node)["kvmesh_router_decisions_total"] > REQUESTS // 4


async def test_a14_one_plan_in_fifty_that_is_not_given_back_shows(
    folder: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, calls = PlanCall.leave, iter(range(10**9))

    def forgetful(call: PlanCall) -> None:
        if next(calls) % 50 != 7:
            leave(call)

    monkeypatch.setattr(PlanCall, "leave", forgetful)
    async with rig(folder, seen) as one:
        await storm(one, 100)
        with pytest.raises(TimeoutError):
            await until(lambda: not one.left(), 3)
        assert any("reservations" in name for name in one.left())
