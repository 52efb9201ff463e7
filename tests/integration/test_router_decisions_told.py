"""A router's decisions as they are told: over gRPC, in spans and metrics, by the command."""

import asyncio
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmesh import models
from kvmesh.clock import SystemClock
from kvmesh.config import environment
from kvmesh.discovery import DiscoveryConfig, DiscoveryKind, create
from kvmesh.engine.factory import EngineConfig
from kvmesh.engine.sim.config import SimConfig
from kvmesh.engine.sim.latency import Latency
from kvmesh.errors import DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from kvmesh.host.config import ModelConfig
from kvmesh.rpc.clients import PlanCall, RouteQuery, route
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.decisions import DecisionQuery, RoutingDecision, watch_decisions
from kvmesh.rpc.peer import Peer
from kvmesh.testing.cluster import until
from kvmesh.testing.mesh import Mesh, Node, mesh, worker
from kvmesh.testing.spans import SpanLedger
from kvmesh.types import Context, Plan, Role, State, Worker
from services.decode.app import app as decode_app
from services.decode.config import DecodeConfig
from services.prefill.app import app as prefill_app
from services.prefill.config import PrefillConfig
from services.router import decisions
from services.router.app import app as router_app
from services.router.config import RouterConfig
from services.router.planner import RoutingConfig

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
SECONDS = 60.0


@dataclass
class Routed:
    """A router among simulated workers, and connections to it."""

    mesh: Mesh
    routers: list[Node]
    spans: SpanLedger
    stack: AsyncExitStack

    def peer(self, number: int = 0) -> Peer:
        member = self.routers[number].member
        peer = Peer(Worker(member.id, member.epoch, member.address), "test", RpcConfig())
        self.stack.push_async_callback(peer.aclose)
        return peer

    def ids(self, role: Role) -> list[str]:
        return [node.member.id for node in self.mesh.nodes if node.member.role is role]

    def metric(self, name: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.routers[0].process.telemetry.render().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((name + "{", name + " ")) and all(w in line for w in wanted)
        )


@asynccontextmanager
async def routed(
    folder: Path, routing: RoutingConfig | None = None, routers: int = 1
) -> AsyncIterator[Routed]:
    """Yield a mesh of one prefill and two decode workers, all known to each router."""
    model = ModelConfig(path=models.tiny_folder(folder), name="m")
    engine = EngineConfig(name="sim", sim=SimConfig(latency=Latency(speed=0.0)))
    config = RouterConfig(routing=routing or RoutingConfig())
    spans = SpanLedger()
    async with mesh(spans=spans) as running, AsyncExitStack() as stack:
        prefill = PrefillConfig(model=model, engine=engine)
        await running.start(Role.PREFILL, worker(prefill_app), prefill)
        for _ in range(2):
            decode = DecodeConfig(model=model, engine=engine)
            await running.start(Role.DECODE, worker(decode_app), decode)
        nodes = [await running.start(Role.ROUTER, router_app, config) for _ in range(routers)]
        found = Routed(running, nodes, spans, stack)
        for node in nodes:
            await until(lambda node=node: _routable(node) == 3)  # type: ignore[misc]
        yield found


def _routable(node: Node) -> float:
    name = "kvmesh_router_workers{"
    lines = node.process.telemetry.render().decode().splitlines()
    found = [line for line in lines if line.startswith(name) and 'routable="yes"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def ask(peer: Peer, request_id: str, tokens: int = 100, **more: Any) -> PlanCall:
    deadline = more.pop("deadline", None)
    query = RouteQuery(more.pop("model", "m"), tokens, 16, (), 16, **more)
    return route(peer, query, Context(request_id, deadline), CLOCK)


async def plan(call: PlanCall) -> Plan:
    async with asyncio.timeout(10):
        return await call.value


async def told(peer: Peer, **query: Any) -> list[RoutingDecision]:
    found: list[RoutingDecision] = []
    async with asyncio.timeout(10), aclosing(watch_decisions(peer, DecisionQuery(**query))) as news:
        async for dropped, some in news:
            assert dropped == 0
            found += some
    return found


# Over gRPC


async def test_a_plan_is_told_with_its_reasons(tmp_path: Path) -> None:
    async with routed(tmp_path / "m") as mesh:
        peer = mesh.peer()
        async with ask(peer, "r1") as call:
            answer = await plan(call)
            (found,) = await told(peer)
            assert found.cached_tokens is None
            call.prefilled(cached_tokens=32)
            await until(lambda: mesh.metric("kvmesh_router_waiting") == 0)
        async with ask(peer, "r2", 8) as call:
            await plan(call)
        _, short = await told(peer)

        assert answer.prefill is not None
        assert (answer.policy, answer.reason, answer.waited) == ("kv", "configured", 0.0)
        assert (found.request_id, found.model, found.outcome) == ("r1", "m", "remote")
        assert (found.policy, found.reason) == ("kv", "configured")
        assert (found.decode, found.prefill) == (answer.decode.id, answer.prefill.id)
        assert (found.prompt_tokens, found.expected_cached_tokens) == (100, 0)
        assert {one.worker_id for one in found.decode_candidates} == set(mesh.ids(Role.DECODE))
        assert [one.worker_id for one in found.prefill_candidates] == mesh.ids(Role.PREFILL)
        assert abs(found.time - CLOCK.wall()) < 600
        assert (short.outcome, short.reason, short.prefill) == ("local", "short", "")
        counted = mesh.metric(
            "kvmesh_router_decisions_total", policy="kv", kind="local", reason="short"
        )
        assert counted == 1


async def test_what_was_cached_in_truth_is_told_once_it_is_known(tmp_path: Path) -> None:
    async with routed(tmp_path / "m") as mesh:
        peer = mesh.peer()
        async with ask(peer, "r1") as call:
            await plan(call)
            call.prefilled(cached_tokens=32)
            # Answers come in order: that of a later request comes after the news.
            async with ask(peer, "r2") as later:
                await plan(later)
        assert [one.cached_tokens for one in await told(peer)] == [32, None]


async def test_waiting_and_refusals_are_told_with_the_place_in_the_queue(tmp_path: Path) -> None:
    routing = RoutingConfig(max_requests_per_worker=1)
    async with routed(tmp_path / "m", routing) as mesh:
        peer = mesh.peer()
        async with ask(peer, "r1", 8) as first, ask(peer, "r2", 8) as second:
            await plan(first)
            await plan(second)
            third, late = ask(peer, "r3", 8), ask(peer, "r4", 8, deadline=CLOCK.now() + 0.05)
            gone = ask(peer, "r5", 8)
            with pytest.raises((DeadlineError, OverloadedError)):
                await plan(late)
            gone.leave()
            await until(lambda: mesh.metric("kvmesh_router_waiting") == 1)
        async with third:
            answer = await plan(third)
        found = {one.request_id: one for one in await told(peer)}

        assert answer.waited >= 0.04
        assert found["r3"].waited_seconds == answer.waited
        assert (found["r3"].queue_position, found["r3"].outcome) == (1, "local")
        assert (found["r4"].outcome, found["r4"].decode) == ("refused", "")
        assert found["r4"].reason == "DEADLINE_EXCEEDED"
        assert found["r4"].queue_position == 2
        assert (found["r5"].outcome, found["r5"].reason) == ("cancelled", "CANCELLED")
        assert found["r1"].queue_position == found["r1"].waited_seconds == 0
        assert [one.request_id for one in await told(peer, outcomes=["refused"])] == ["r4"]
        spans = [dict(s.attributes or {}) for s in mesh.spans.ended if s.name == "route"]
        places = {s.get("kvmesh.queue_position") for s in spans}
        assert places >= {None, 1, 2}
        waits = [s["kvmesh.queue_seconds"] for s in spans if s.get("kvmesh.queue_position") == 1]
        assert waits == [answer.waited]


async def test_an_attempt_after_a_failure_tells_what_it_avoided(tmp_path: Path) -> None:
    async with routed(tmp_path / "m") as mesh:
        peer = mesh.peer()
        prefills, decodes = mesh.ids(Role.PREFILL), mesh.ids(Role.DECODE)
        async with ask(peer, "r1", excluded=prefills) as call:
            await plan(call)
        with pytest.raises((UnavailableError, DeadlineError)):
            await plan(ask(peer, "r2", excluded=decodes, deadline=CLOCK.now() + 0.05))
        first, second = await told(peer)
        assert (first.outcome, first.reason) == ("local", "no_worker")
        assert list(first.excluded) == prefills
        assert (second.outcome, list(second.excluded)) == ("refused", decodes)


async def test_a_model_that_nobody_announced_is_not_named(tmp_path: Path) -> None:
    async with routed(tmp_path / "m") as mesh:
        peer = mesh.peer()
        with pytest.raises(InvalidRequestError):
            await plan(ask(peer, "r1", model="my secret"))
        (found,) = await told(peer)
        assert (found.model, found.reason) == ("other", "UNKNOWN_MODEL")


async def test_following_leaves_no_gap_and_repeats_nothing(tmp_path: Path) -> None:
    async with routed(tmp_path / "m") as mesh:
        peer = mesh.peer()

        async def decide(*numbers: int) -> None:
            for number in numbers:
                async with ask(peer, f"r{number}", 8) as call:
                    await plan(call)

        await decide(*range(5))
        found: list[str] = []
        query = DecisionQuery(limit=3, follow=True)
        async with asyncio.timeout(10), aclosing(watch_decisions(peer, query)) as news:
            deciding: asyncio.Task[None] | None = None
            async for _, some in news:
                found += [one.request_id for one in some]
                deciding = deciding or asyncio.create_task(decide(*range(5, 200)))
                if found[-1] == "r199":
                    break
        assert deciding is not None
        await deciding
        assert found == [f"r{number}" for number in range(2, 200)]
        await until(lambda: mesh.metric("kvmesh_router_decision_followers") == 0)


async def test_a_burst_that_is_too_much_for_a_reader_is_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MAX_BEHIND", 4)
    async with routed(tmp_path / "m") as mesh:
        peer = mesh.peer()
        async with ask(peer, "r", 8) as call:
            await plan(call)
        follow = DecisionQuery(limit=0, follow=True)
        async with aclosing(watch_decisions(mesh.peer(), follow)) as news:
            first = asyncio.ensure_future(anext(news))
            await until(lambda: mesh.metric("kvmesh_router_decision_followers") == 1)
            # In one message, so that they are decided in one turn of the router.
            calls = [ask(peer, f"r{number}", 8) for number in range(40)]
            await asyncio.gather(*(plan(call) for call in calls))
            async with asyncio.timeout(10):
                dropped, some = await first
                told = [one.request_id for one in some]
                while told[-1] != "r39":
                    more, some = await anext(news)
                    dropped += more
                    told += [one.request_id for one in some]
            assert dropped > 0
            assert dropped + len(told) == 40
            assert told == sorted(told, key=lambda name: int(name[1:]))
        assert mesh.metric("kvmesh_router_decisions_dropped_total") == dropped
        for call in calls:
            call.leave()


async def test_wrong_outcomes_and_too_many_readers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MAX_FOLLOWERS", 1)
    async with routed(tmp_path / "m") as mesh:
        peer = mesh.peer()
        with pytest.raises(InvalidRequestError) as caught:
            await told(peer, outcomes=["unspecified"])
        assert caught.value.field == "outcomes"
        follow = DecisionQuery(follow=True)
        async with aclosing(watch_decisions(peer, follow)) as first:
            waiting = asyncio.ensure_future(anext(first))
            await until(lambda: mesh.metric("kvmesh_router_decision_followers") == 1)
            with pytest.raises(OverloadedError):
                await told(peer, follow=True)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


# The command


@asynccontextmanager
async def listed(mesh: Routed, state_dir: Path) -> AsyncIterator[list[str]]:
    """List the mesh in a registry of the local kind; yield the options that lead there."""
    where = DiscoveryConfig(kind=DiscoveryKind.LOCAL, directory=str(state_dir / "members"))
    async with AsyncExitStack() as stack:
        discovery = await stack.enter_async_context(create(where, CLOCK, random.Random(1)))
        for node in mesh.mesh.nodes:
            registration = await stack.enter_async_context(discovery.register(node.member))
            await registration.set_state(State.READY)
        yield ["--state-dir", str(state_dir)]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvmesh.cli", "router", "decisions", *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
        cwd=ROOT,
    )  # fmt: skip


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await start(*arguments)
    async with asyncio.timeout(SECONDS):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_the_command_merges_all_routers_in_order(tmp_path: Path) -> None:
    async with routed(tmp_path / "m", routers=2) as mesh, listed(mesh, tmp_path / "s") as where:
        for number in range(6):
            tokens = 100 if number < 3 else 8
            async with ask(mesh.peer(number % 2), f"r{number}", tokens) as call:
                await plan(call)

        code, shown, errors = await run(*where)
        heading, *rows = shown.splitlines()
        assert (code, errors) == (0, "")
        assert heading.split()[:3] == ["time", "router", "request"]
        assert [row.split()[2] for row in rows] == [f"r{number}" for number in range(6)]
        assert [row.split()[1] for row in rows] == mesh.ids(Role.ROUTER) * 3
        assert [row.split()[4] for row in rows] == ["remote"] * 3 + ["local"] * 3

        _, shown, _ = await run(*where, "--limit", "2", "--json")
        lines = [json.loads(line) for line in shown.splitlines()]
        assert [line["request_id"] for line in lines] == ["r4", "r5"]
        assert lines[0]["router"] == mesh.ids(Role.ROUTER)[0]
        assert lines[0]["decode_candidates"][0]["worker_id"] in mesh.ids(Role.DECODE)

        prefill = mesh.ids(Role.PREFILL)[0]
        _, shown, _ = await run(*where, "--worker", prefill, "--candidates")
        assert shown.count(f"    prefill {prefill}: score") == 3
        assert "r3" not in shown
        _, shown, _ = await run(*where, "--request", "chatcmpl-r2", "--outcome", "remote")
        assert [line.split()[2] for line in shown.splitlines()[1:]] == ["r2"]
        code, shown, errors = await run(*where, "--model", "another")
        assert (code, shown, errors) == (0, "", "no such decision is remembered\n")


async def test_the_command_follows_until_it_is_interrupted(tmp_path: Path) -> None:
    async with routed(tmp_path / "m", routers=2) as mesh, listed(mesh, tmp_path / "s") as where:
        peers = [mesh.peer(0), mesh.peer(1)]
        async with ask(peers[0], "before", 8) as call:
            await plan(call)
        process = await start(*where, "--follow", "--json")
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            found = [json.loads(await process.stdout.readline())["request_id"]]
            await until(lambda: mesh.metric("kvmesh_router_decision_followers") == 1)
            for number in range(4):
                async with ask(peers[number % 2], f"r{number}", 8) as call:
                    await plan(call)
                found.append(json.loads(await process.stdout.readline())["request_id"])
            process.send_signal(signal.SIGINT)
            rest, errors = await process.communicate()
        assert found == ["before", "r0", "r1", "r2", "r3"]
        assert (process.returncode, rest, errors) == (0, b"", b"")


async def test_the_command_says_which_router_is_gone(tmp_path: Path) -> None:
    async with routed(tmp_path / "m", routers=2) as mesh, listed(mesh, tmp_path / "s") as where:
        async with ask(mesh.peer(0), "r0", 8) as call:
            await plan(call)
        await mesh.routers[1].kill()
        code, shown, errors = await run(*where)
        assert code == 0
        assert "r0" in shown
        assert errors.startswith(mesh.routers[1].member.id + ": ")

        await mesh.routers[0].kill()
        code, shown, errors = await run(*where)
        assert (code, shown) == (1, "")
        assert errors.startswith("Error: ")
        assert all(node.member.id in errors for node in mesh.routers)


async def test_the_command_without_routers(tmp_path: Path) -> None:
    code, shown, errors = await run("--state-dir", str(tmp_path / "none"))
    assert (code, shown) == (1, "")
    assert errors == "Error: no router runs here: `kvmesh status` shows what does\n"
