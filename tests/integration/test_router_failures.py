"""Failures reach the router as what they are, and it leaves alone who keeps failing."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from kvmesh.engine.factory import EngineConfig
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.stepper import SimStepper
from kvmesh.errors import (
    ContextLengthError,
    DrainingError,
    EngineError,
    InternalError,
    InvalidRequestError,
    MeshError,
    OverloadedError,
    ProtocolError,
    TicketError,
    TransferError,
    UnavailableError,
)
from kvmesh.host.config import ModelConfig
from kvmesh.testing import fakes
from kvmesh.testing.cluster import until
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL, FakeDecode
from kvmesh.testing.mesh import Mesh, Node, mesh, worker
from kvmesh.testing.tokenizer_folders import byte_level_folder
from kvmesh.types import FinishReason, Leg, Role
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.frontend.app import app as frontend_app
from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig
from services.prefill.app import app as prefill_app
from services.prefill.config import PrefillConfig
from services.router.app import app as router_app
from services.router.config import RouterConfig
from services.router.planner import RoutingConfig
from services.router.quarantine import QuarantineConfig
from services.tokenizer.app import app as tokenizer_app
from services.tokenizer.config import TokenizerConfig

TEXT = "/v1/completions"
HOLD_SECONDS = 1.0


# What the frontend tells


@asynccontextmanager
async def apart(**limits: Any) -> AsyncIterator[tuple[FakeMesh, httpx.AsyncClient]]:
    """A frontend among fakes that prefill remotely, and its client."""
    config = FrontendConfig(http=HttpConfig(port=0), limits=LimitsConfig(**limits))
    async with (
        fake_mesh(frontend_app, config, remote=True) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client,
    ):
        yield running, client


async def ask(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post(TEXT, json={"model": MODEL, "prompt": "tell me", **more})


def raises(error: MeshError, after: bytes = b"") -> fakes.Script:
    async def script(fake: FakeDecode, start: Any, emit: fakes.Emit) -> FinishReason:
        if after:
            emit(after)
        raise error

    return script


@pytest.mark.parametrize("after", [b"", b"some"])
@pytest.mark.parametrize(
    ("error", "leg"),
    [
        (EngineError("x"), Leg.DECODE),
        (InternalError("x"), Leg.DECODE),
        (ProtocolError("x"), Leg.DECODE),
        (UnavailableError("x"), Leg.DECODE),
        (TransferError("x"), Leg.HANDOFF),
        (TicketError("x"), Leg.HANDOFF),
    ],
)
async def test_a50_what_is_a_workers_fault_is_told(
    error: MeshError, leg: Leg, after: bytes
) -> None:
    async with apart(attempts=1) as (running, client):
        running.decode.script = raises(error, after)
        assert (await ask(client)).status_code >= 500
        await running.idle()
        assert running.router.failed == [leg]
        assert running.router.timed_out == []


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("bad", field="prompt"),
        ContextLengthError("long", field="prompt"),
        OverloadedError("full"),
        DrainingError("going"),
    ],
)
async def test_a50_what_is_not_a_workers_fault_is_not(error: MeshError, leg: Leg) -> None:
    async with apart(attempts=1) as (running, client):
        fake = running.prefill if leg is Leg.PREFILL else running.decode
        fake.refuses = error
        assert (await ask(client)).status_code >= 400
        await running.idle()
        assert (running.router.failed, running.router.timed_out) == ([], [])


async def test_a50_clients_that_leave_are_not_a_workers_fault() -> None:
    async with apart() as (running, client):
        for script in (fakes.stall, fakes.babble):
            running.decode.script = script
            asking = asyncio.create_task(ask(client))
            await running.decode.until(lambda: running.decode.live == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await running.idle()
        assert (running.router.failed, running.router.timed_out) == ([], [])


async def test_a_prefill_worker_that_fails_is_told_as_such() -> None:
    async with apart() as (running, client):
        running.prefill.refuses = UnavailableError("gone")
        assert (await ask(client)).status_code == 200
        await running.idle()
        assert running.router.failed == [Leg.PREFILL]
        # The second plan has no prefill worker left: what it shows is decode's doing.
        assert running.router.generating == [2]


async def test_a_request_that_is_served_is_told_once() -> None:
    async with apart() as (running, client):
        assert (await ask(client)).status_code == 200
        await running.idle()
        assert running.router.generating == [1]
        assert running.router.failed == []


def stall_prefill(running: FakeMesh) -> None:
    running.prefill.hold = asyncio.Event()


def stall_decode(running: FakeMesh) -> None:
    running.decode.script = fakes.stall


def babble(running: FakeMesh) -> None:
    running.decode.script = fakes.babble


@pytest.mark.parametrize(
    ("stage", "told"),
    [(stall_prefill, [Leg.PREFILL]), (stall_decode, [Leg.DECODE]), (babble, [])],
)
async def test_a50_time_that_runs_out_is_told_apart(
    stage: Callable[[FakeMesh], None], told: list[Leg]
) -> None:
    async with apart(request_seconds=1.0) as (running, client):
        stage(running)
        assert (await ask(client)).status_code == 504
        await running.idle()
        assert running.router.timed_out == told
        assert running.router.failed == []


# What the router makes of it


class Pulls:
    """Makes the hand-over fail between one prefill and one decode worker, while told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken: tuple[str, str] | None = None
        self.failures = 0
        adopt = SimStepper.adopt

        def checked(stepper: Any, sequence: Any, offer: Any, blocks: Any) -> None:
            if self.broken == (sequence.ticket.worker_id, stepper._epoch):
                self.failures += 1
                raise TransferError("the pull failed (planted)")
            adopt(stepper, sequence, offer, blocks)

        monkeypatch.setattr(SimStepper, "adopt", checked)


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[tuple[Mesh, httpx.AsyncClient]]:
    """Two prefill and two decode workers behind one router."""
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    facts = {"vocab_size": size, "max_position_embeddings": 2048, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    model = ModelConfig(path=folder, name=MODEL)
    engine = EngineConfig(name="sim", sim=SimConfig(sample_from=10))
    quarantine = QuarantineConfig(hold_seconds=HOLD_SECONDS, max_hold_seconds=HOLD_SECONDS)
    async with mesh() as running:
        await running.start(Role.TOKENIZER, tokenizer_app, TokenizerConfig(model=model))
        for _ in range(2):
            prefill = PrefillConfig(model=model, engine=engine)
            await running.start(Role.PREFILL, worker(prefill_app), prefill)
            decode = DecodeConfig(model=model, engine=engine)
            await running.start(Role.DECODE, worker(decode_app), decode)
        routing = RoutingConfig(policy="random", quarantine=quarantine)
        await running.start(Role.ROUTER, router_app, RouterConfig(routing=routing))
        config = FrontendConfig(http=HttpConfig(port=0))
        frontend = await running.start(Role.FRONTEND, frontend_app, config)
        url = f"http://{frontend.member.http_address}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            await until(lambda: shown(of(running, Role.ROUTER)[0], "workers", routable="yes") == 4)
            yield running, client


def of(running: Mesh, role: Role) -> list[Node]:
    return [node for node in running.nodes if node.member.role is role]


def shown(node: Node, name: str, **labels: str) -> float:
    page = node.process.telemetry.render().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == f"kvmesh_router_{name}" and labels.items() <= sample.labels.items()
    )


async def test_a_pair_that_fails_together_is_parted_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = Pulls(monkeypatch)
    async with real(byte_level_folder(tmp_path / "model")) as (running, client):
        (router,) = of(running, Role.ROUTER)
        prefill, decode = of(running, Role.PREFILL)[0].member, of(running, Role.DECODE)[0].member
        count = 0

        async def parted() -> bool:
            nonlocal count
            count += 1
            answer = await ask(client, prompt=f"{count} word" * 40, max_tokens=2, temperature=0)
            assert answer.status_code == 200, answer.text
            return bool(shown(router, "quarantined", worker=prefill.id, partner=decode.id))

        pulls.broken = (prefill.id, decode.epoch)
        await until(parted)
        assert shown(router, "quarantined") == 1
        before, began = pulls.failures, asyncio.get_running_loop().time()
        for _ in range(40):
            await parted()
        # Without quarantine a quarter of them would have failed first; with it, one a hold.
        holds = (asyncio.get_running_loop().time() - began) / HOLD_SECONDS
        assert pulls.failures - before <= 1 + holds

        pulls.broken = None

        async def together() -> bool:
            return not await parted()

        await until(together)
        assert shown(router, "quarantined") == 0


async def test_a50_bad_requests_and_a_crash_of_another_leave_a_worker_in_routing(
    tmp_path: Path,
) -> None:
    async with real(byte_level_folder(tmp_path / "model")) as (running, client):
        (router,) = of(running, Role.ROUTER)
        for _ in range(20):
            answer = await ask(client, prompt=[1, 99_999_999], max_tokens=2)
            assert answer.status_code == 400
        assert (await ask(client, max_tokens=2)).status_code == 200
        assert shown(router, "quarantined") == 0
