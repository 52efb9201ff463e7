"""The router over real gRPC: a frontend's stream on one side, workers' events on the other."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvmesh.clock import SystemClock
from kvmesh.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from kvmesh.host.process import Process
from kvmesh.rpc.clients import PlanCall, RouteQuery, route
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.gate import Gate
from kvmesh.rpc.peer import Peer
from kvmesh.rpc.server import serve
from kvmesh.telemetry import quiet_telemetry
from kvmesh.testing.discovery import MemoryText
from kvmesh.types import Context, Member, Plan, Role, State, Worker
from kvmesh.v1 import worker_pb2, worker_pb2_grpc
from services.router.admission import QueueConfig
from services.router.app import app
from services.router.config import RouterConfig
from services.router.planner import RoutingConfig
from services.router.watcher import WatchConfig

CLOCK = SystemClock()
RPC = RpcConfig(drain_seconds=1)


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that streams what a test puts into its queues."""

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.role, self.epoch = name, role, "e1"
        self.port = 0
        self.server: Any = None
        self.watchers: list[asyncio.Queue[worker_pb2.WorkerEvent]] = []
        self.cached: list[int] = []

    async def WatchEvents(
        self, request: worker_pb2.WatchEventsRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.WatchEventsResponse, None]:
        queue: asyncio.Queue[worker_pb2.WorkerEvent] = asyncio.Queue()
        self.watchers.append(queue)
        sequence = 1
        event = worker_pb2.WorkerEvent(snapshot=worker_pb2.BlockHashes(hashes=self.cached))
        while True:
            yield worker_pb2.WatchEventsResponse(
                worker_id=self.name, epoch=self.epoch, sequence=sequence, events=[event]
            )
            event = await queue.get()
            sequence += 1

    def tell(self, **event: Any) -> None:
        for queue in self.watchers:
            queue.put_nowait(worker_pb2.WorkerEvent(**event))

    async def start(self) -> None:
        self.server = grpc.aio.server(options=RPC.server_options())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def kill(self) -> None:
        await self.server.stop(0)

    def member(self) -> Member:
        return Member(
            id=self.name,
            role=self.role,
            epoch=self.epoch,
            address=f"127.0.0.1:{self.port}",
            state=State.READY,
            model="m",
            block_size=16,
            layout_fingerprint="layout",
        )


class Registry:
    """Discovery in memory, changed by the test."""

    def __init__(self) -> None:
        self.members: tuple[Member, ...] = ()
        self._changed = asyncio.Event()

    def set(self, *members: Member) -> None:
        self.members = members
        self._changed.set()

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        while True:
            self._changed.clear()
            yield self.members
            await self._changed.wait()

    def shared(self, name: str) -> MemoryText:
        return MemoryText()

    @asynccontextmanager
    async def register(self, member: Member) -> AsyncIterator[Any]:
        raise AssertionError(f"{member.id} is not to be registered here")
        yield


class Mesh:
    """One router with its workers, and a client of it."""

    def __init__(self, spans: InMemorySpanExporter) -> None:
        self.registry = Registry()
        self.telemetry = quiet_telemetry(spans)
        self.gate = Gate()
        self.spans = spans
        self.workers: dict[str, FakeWorker] = {}
        self.address = ""
        self.stack = AsyncExitStack()

    async def add(self, *names: str) -> None:
        for name in names:
            role = Role.DECODE if name.startswith("d") else Role.PREFILL
            worker = self.workers[name] = FakeWorker(name, role)
            await worker.start()
            self.stack.push_async_callback(worker.kill)
        self.list_all()
        await self.until(lambda: self.metric("kvmesh_router_workers", routable="no") == 0)
        await self.until(
            lambda: self.metric("kvmesh_router_workers", routable="yes") == len(self.workers)
        )

    def list_all(self) -> None:
        self.registry.set(*(w.member() for w in self.workers.values()))

    async def client(self) -> Peer:
        peer = Peer(Worker("router", "", self.address), "test", RPC)
        self.stack.push_async_callback(peer.aclose)
        return peer

    def metric(self, name: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in self.telemetry.render().decode().splitlines():
            if line.startswith((name + "{", name + " ")) and all(w in line for w in wanted):
                total += float(line.rpartition(" ")[2])
        return total

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - metrics are pulled
                await asyncio.sleep(0.005)


def context(**fields: Any) -> Context:
    return Context(**({"request_id": "r"} | fields))


def ask(peer: Peer, prompt_tokens: int = 10, *, model: str = "m", **fields: Any) -> PlanCall:
    query: dict[str, Any] = {"max_tokens": 16, "block_hashes": (), "block_size": 16}
    excluded = fields.pop("excluded", ())
    hashes = fields.pop("block_hashes", ())
    session = fields.pop("session", "")
    fair_key = fields.pop("fair_key", "")
    full = RouteQuery(
        model,
        prompt_tokens,
        **(query | {"block_hashes": hashes}),
        excluded=excluded,
        session=session,
        fair_key=fair_key,
    )
    return route(peer, full, context(**fields), CLOCK)


@asynccontextmanager
async def router(**sections: Any) -> AsyncIterator[Mesh]:
    mesh = Mesh(InMemorySpanExporter())
    config = RouterConfig(
        rpc=RPC,
        watch=WatchConfig(retry_min_seconds=0.005, retry_max_seconds=0.02),
        **sections,
    )
    process = Process(
        id="router-1",
        role=Role.ROUTER,
        epoch="e1",
        clock=CLOCK,
        rng=random.Random(5),
        telemetry=mesh.telemetry,
        discovery=mesh.registry,
        gate=mesh.gate,
        environ={},
    )
    async with (
        app(config, process) as service,
        serve(RPC, dict(service.registrations)) as server,
        mesh.stack,
    ):
        mesh.address = f"127.0.0.1:{server.port}"
        yield mesh


async def plan(call: PlanCall) -> Plan:
    async with asyncio.timeout(10):
        return await call.value


async def test_a_plan_names_both_workers_and_holds_a_reservation_until_it_is_left() -> None:
    async with router() as mesh:
        await mesh.add("d0", "p0")
        peer = await mesh.client()
        async with ask(peer, 100) as call:
            answer = await plan(call)

            assert (answer.decode.id, answer.decode.epoch) == ("d0", "e1")
            assert answer.decode.address == mesh.workers["d0"].member().address
            assert answer.prefill is not None
            assert answer.prefill.id == "p0"
            assert mesh.metric("kvmesh_router_reserved_requests", worker="p0") == 1
            call.prefilled()
            await mesh.until(
                lambda: mesh.metric("kvmesh_router_reserved_requests", worker="p0") == 0
            )
            assert mesh.metric("kvmesh_router_reserved_requests", worker="d0") == 1
        await mesh.until(lambda: mesh.metric("kvmesh_router_reservations") == 0)
        assert mesh.metric("kvmesh_router_reserved_blocks", worker="d0") == 0
        assert mesh.metric("kvmesh_router_decisions_total", kind="remote") == 1


async def test_a32_a_burst_is_spread_and_all_ends_with_the_stream() -> None:
    async with router() as mesh:
        await mesh.add("d0", "d1", "d2", "d3")
        peer = await mesh.client()
        calls = [ask(peer) for _ in range(64)]
        plans = await asyncio.gather(*(plan(call) for call in calls))

        share = [sum(p.decode.id == name for p in plans) for name in mesh.workers]
        assert share == [16, 16, 16, 16]
        assert mesh.metric("kvmesh_router_reservations") == 64

        await peer.aclose()
        await mesh.until(lambda: mesh.metric("kvmesh_router_reservations") == 0)
        for name in mesh.workers:
            assert mesh.metric("kvmesh_router_reserved_requests", worker=name) == 0
        await mesh.until(lambda: mesh.gate.running == 0)


async def test_the_cache_that_a_worker_told_of_shows_in_the_plan() -> None:
    async with router() as mesh:
        await mesh.add("d0", "p0")
        peer = await mesh.client()
        hashes = [2**64 - 1 - i for i in range(6)]
        mesh.workers["d0"].tell(stored=worker_pb2.BlockHashes(hashes=hashes))

        async def cached() -> Plan:
            while True:
                async with ask(peer, 100, block_hashes=hashes) as call:
                    answer = await plan(call)
                if answer.expected_cached_tokens:
                    return answer

        async with asyncio.timeout(10):
            answer = await cached()
        assert answer.expected_cached_tokens == 96
        assert answer.prefill is None


async def test_a_plan_outlasts_the_deadline_until_its_client_ends_it() -> None:
    async with router() as mesh:
        await mesh.add("d0")
        peer = await mesh.client()
        async with ask(peer, deadline=CLOCK.now() + 0.2) as first:
            await plan(first)
            # The second one's time is up later than the first one's.
            async with ask(peer, deadline=CLOCK.now() + 0.3, excluded=["d0"]) as second:
                with pytest.raises(DeadlineError):
                    await plan(second)
            assert mesh.metric("kvmesh_router_reservations") == 1
        await mesh.until(lambda: mesh.metric("kvmesh_router_reservations") == 0)


async def test_excluded_workers_are_avoided() -> None:
    async with router(queue=QueueConfig(wait_for_worker_seconds=0)) as mesh:
        await mesh.add("d0", "d1")
        peer = await mesh.client()
        for _ in range(8):
            async with ask(peer, excluded=["d0"]) as call:
                assert (await plan(call)).decode.id == "d1"
        async with ask(peer, excluded=["d0", "d1"]) as call:
            with pytest.raises(UnavailableError) as caught:
                await plan(call)
        assert caught.value.retry_after == 1.0


async def test_errors_say_what_is_wrong() -> None:
    async with router(routing=RoutingConfig(max_requests_per_worker=1)) as mesh:
        await mesh.add("d0")
        peer = await mesh.client()
        for call, kind, field in (
            (ask(peer, model="never"), UnknownModelError, "model"),
            (ask(peer, model=""), InvalidRequestError, "model"),
            (ask(peer, 0), InvalidRequestError, "prompt_tokens"),
        ):
            with pytest.raises(kind) as caught:
                await plan(call)
            assert caught.value.field == field
        async with ask(peer) as holder:
            await plan(holder)
            with pytest.raises(DeadlineError):
                await plan(ask(peer, deadline=CLOCK.now() + 0.05))
        assert mesh.metric("kvmesh_router_refusals_total", reason="UNKNOWN_MODEL") == 1
        await mesh.until(lambda: mesh.metric("kvmesh_router_waiting") == 0)


async def test_a_full_worker_makes_requests_wait_and_a_full_queue_refuses() -> None:
    async with router(
        routing=RoutingConfig(max_requests_per_worker=1), queue=QueueConfig(max_requests=1)
    ) as mesh:
        await mesh.add("d0")
        peer = await mesh.client()
        async with ask(peer) as first:
            await plan(first)
            second = ask(peer)
            with pytest.raises(OverloadedError):
                await plan(ask(peer))
            assert mesh.metric("kvmesh_router_waiting") == 1
            assert not second.value.done()
        async with second:
            assert (await plan(second)).decode.id == "d0"
        await mesh.until(lambda: mesh.metric("kvmesh_router_reservations") == 0)


async def test_a_crowd_of_one_key_does_not_hold_up_another() -> None:
    async with router(routing=RoutingConfig(max_requests_per_worker=1)) as mesh:
        await mesh.add("d0")
        peer = await mesh.client()
        async with ask(peer) as first, AsyncExitStack() as waiting:
            await plan(first)
            crowd = [ask(peer, 100, fair_key="crowd") for _ in range(100)]
            modest = ask(peer, 100, fair_key="modest")
            for call in [*crowd, modest]:
                await waiting.enter_async_context(call)
            await mesh.until(lambda: mesh.metric("kvmesh_router_waiting") == 101)

            first.leave()
            await plan(crowd[0])
            crowd[0].leave()

            assert (await plan(modest)).decode.id == "d0"
            assert not any(call.value.done() for call in crowd[1:])
        await mesh.until(lambda: mesh.metric("kvmesh_router_reservations") == 0)
        assert mesh.metric("kvmesh_router_waiting") == 0


async def test_a_request_that_leaves_the_queue_takes_nothing_with_it() -> None:
    async with router(routing=RoutingConfig(max_requests_per_worker=1)) as mesh:
        await mesh.add("d0")
        peer = await mesh.client()
        async with ask(peer) as first:
            await plan(first)
            async with ask(peer):
                await mesh.until(lambda: mesh.metric("kvmesh_router_waiting") == 1)
            await mesh.until(lambda: mesh.metric("kvmesh_router_waiting") == 0)
        await mesh.until(lambda: mesh.metric("kvmesh_router_reservations") == 0)


async def test_a28_a_killed_worker_leaves_routing_before_the_registry_notices() -> None:
    async with router() as mesh:
        await mesh.add("d0", "d1")
        peer = await mesh.client()
        await mesh.workers["d0"].kill()
        await mesh.until(lambda: mesh.metric("kvmesh_router_workers", routable="no") == 1)

        for _ in range(8):
            async with ask(peer) as call:
                assert (await plan(call)).decode.id == "d1"


async def test_a_restarted_worker_is_used_again_as_its_new_life() -> None:
    async with router() as mesh:
        await mesh.add("d0")
        peer = await mesh.client()
        worker = mesh.workers["d0"]
        async with ask(peer) as call:
            await plan(call)
            await worker.kill()
            worker.epoch = "e2"
            await worker.start()
            mesh.list_all()
            async with ask(peer) as waiting:
                assert (await plan(waiting)).decode.epoch == "e2"
            await mesh.until(
                lambda: mesh.metric("kvmesh_router_reserved_requests", worker="d0") == 0
            )
        await mesh.until(lambda: mesh.metric("kvmesh_router_reservations") == 0)


async def test_a_worker_that_comes_later_serves_those_who_wait() -> None:
    async with router() as mesh:
        await mesh.add("p0")
        peer = await mesh.client()
        call = ask(peer)
        await mesh.until(lambda: mesh.metric("kvmesh_router_waiting") == 1)

        await mesh.add("d0")

        assert (await plan(call)).decode.id == "d0"
        call.leave()


async def test_a_decision_is_a_span_of_the_requests_trace() -> None:
    async with router() as mesh:
        await mesh.add("d0", "d1", "p0")
        peer = await mesh.client()
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        async with ask(peer, 100, traceparent=parent) as call:
            answer = await plan(call)
        (span,) = mesh.spans.get_finished_spans()

        attributes = dict(span.attributes or {})
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" in parent
        assert span.name == "route"
        assert attributes["kvmesh.policy"] == "kv"
        assert attributes["kvmesh.decode_candidates"] == ("d0", "d1")
        assert attributes["kvmesh.decode_scores"] == pytest.approx((0.015, 0.015))
        assert attributes["kvmesh.decode_worker"] == answer.decode.id
        assert attributes["kvmesh.prefill_worker"] == "p0"


async def test_a_session_stays_on_its_worker() -> None:
    async with router(routing=RoutingConfig(policy="session")) as mesh:
        await mesh.add("d0", "d1", "d2", "d3")
        peer = await mesh.client()
        homes = set()
        for session in ("alice", "bob", "carol", "dave", "erin"):
            used = set()
            for _ in range(3):
                async with ask(peer, session=session) as call:
                    used.add((await plan(call)).decode.id)
            assert len(used) == 1
            homes |= used

    assert len(homes) > 1


async def test_requests_with_a_new_prefix_follow_the_first_of_them() -> None:
    async with router() as mesh:
        await mesh.add("d0", "d1", "d2", "d3")
        peer = await mesh.client()
        hashes = list(range(100))
        async with ask(peer, 1601, block_hashes=hashes) as first:
            home = (await plan(first)).decode.id
            async with ask(peer, 1650, block_hashes=[*hashes, 200]) as second:
                answer = await plan(second)

    assert answer.decode.id == home
    assert answer.expected_cached_tokens == 1600


async def test_a_worker_whose_cache_hits_are_not_those_expected_is_flagged() -> None:
    async with router() as mesh:
        await mesh.add("d0")
        peer = await mesh.client()
        hashes = list(range(100, 110))
        for number in range(12):
            async with ask(peer, 161, block_hashes=hashes) as call:
                await plan(call)
                call.prefilled()
                call.prefilled(cached_tokens=144)
                await mesh.until(
                    lambda n=number: (
                        mesh.metric("kvmesh_router_prompt_tokens_total")  # type: ignore[misc]
                        == 161 * (n + 1)
                    )
                )
            hashes = [block + 1000 for block in hashes]

        assert mesh.metric("kvmesh_router_flagged", worker="d0") == 1
        assert mesh.metric("kvmesh_router_disagreements_total") == 12
        assert mesh.metric("kvmesh_router_cached_tokens_total") == 12 * 144
        assert mesh.metric("kvmesh_router_expected_cached_tokens_total") == 0
