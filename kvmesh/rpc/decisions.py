"""Client of a router's memory: what it decided, and why."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kvmesh.rpc.peer import Peer
from kvmesh.rpc.status import from_rpc_error
from kvmesh.v1 import router_pb2, router_pb2_grpc

_PREFIX = "DECISION_OUTCOME_"

OUTCOMES = tuple(
    name.removeprefix(_PREFIX).lower()
    for name, number in router_pb2.DecisionOutcome.items()
    if number
)
"""What may come of a request at a router: `remote`, `local`, `refused`, `cancelled`."""


@dataclass(frozen=True, slots=True)
class DecisionQuery:
    """Which decisions to tell of: those that fit all filters; empty: any.

    `worker_id` is one that was chosen. `limit` is of the remembered ones, the newest; None:
    all. With `follow` those to come are told as well.
    """

    model: str = ""
    worker_id: str = ""
    policy: str = ""
    request_id: str = ""
    outcomes: Sequence[str] = ()
    limit: int | None = None
    follow: bool = False


@dataclass(frozen=True, slots=True)
class ScoredWorker:
    """A worker that a request could have gone to; the lower its score, the better."""

    worker_id: str
    score: float
    cached_tokens: int
    load_blocks: float
    requests: int


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """One decision, as `RoutingDecision` in the proto says. Times are in (Unix) seconds.

    `cached_tokens` None: not known so far.
    """

    number: int
    time: float
    request_id: str
    model: str
    outcome: str
    reason: str
    policy: str
    decode: str
    prefill: str
    prompt_tokens: int
    expected_cached_tokens: int
    cached_tokens: int | None
    waited_seconds: float
    queue_position: int
    excluded: Sequence[str]
    decode_candidates: Sequence[ScoredWorker]
    prefill_candidates: Sequence[ScoredWorker]


async def watch_decisions(
    peer: Peer, query: DecisionQuery
) -> AsyncGenerator[tuple[int, list[RoutingDecision]], None]:
    """Yield decisions, oldest first, each time with how many were dropped before them.

    Ends after the remembered ones unless `query` follows. Raises `MeshError` when it breaks.
    """
    stub: Any = _stub(peer.channel)
    request = router_pb2.WatchDecisionsRequest(
        model=query.model,
        worker_id=query.worker_id,
        policy=query.policy,
        request_id=query.request_id,
        outcomes=[_PREFIX + name.upper() for name in query.outcomes],
        limit=query.limit,
        follow=query.follow,
    )
    rpc = stub.WatchDecisions(request)
    try:
        async for message in rpc:
            yield message.dropped, [_decision(decision) for decision in message.decisions]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        rpc.cancel()


_stub: Callable[[grpc.aio.Channel], Any] = router_pb2_grpc.RouterServiceStub


def _decision(message: router_pb2.RoutingDecision) -> RoutingDecision:
    known = message.HasField("cached_tokens")
    return RoutingDecision(
        number=message.number,
        time=message.decide_time.ToNanoseconds() / 1e9,
        request_id=message.request_id,
        model=message.model,
        outcome=_outcome(message.outcome),
        reason=message.reason,
        policy=message.policy,
        decode=message.decode_worker_id,
        prefill=message.prefill_worker_id,
        prompt_tokens=message.prompt_tokens,
        expected_cached_tokens=message.expected_cached_tokens,
        cached_tokens=message.cached_tokens if known else None,
        waited_seconds=message.waited_seconds,
        queue_position=message.queue_position,
        excluded=tuple(message.excluded_worker_ids),
        decode_candidates=[_scored(one) for one in message.decode_candidates],
        prefill_candidates=[_scored(one) for one in message.prefill_candidates],
    )


def _outcome(number: int) -> str:
    """Return the name of an outcome; of one that a later version made up, its number."""
    if number in router_pb2.DecisionOutcome.values():
        return router_pb2.DecisionOutcome.Name(number).removeprefix(_PREFIX).lower()
    return str(number)


def _scored(message: router_pb2.ScoredWorker) -> ScoredWorker:
    return ScoredWorker(
        message.worker_id,
        message.score,
        message.cached_tokens,
        message.load_blocks,
        message.requests,
    )
