"""Decisions of all routers of a mesh as one: those remembered in order, then those to come."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from kvmesh.cli.console import CommandError
from kvmesh.cli.settings import OwnConfig
from kvmesh.clock import SystemClock
from kvmesh.discovery import create
from kvmesh.errors import MeshError
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.decisions import DecisionQuery, RoutingDecision, watch_decisions
from kvmesh.rpc.peer import Peer
from kvmesh.types import Member, Role, Worker

_ROUTER_SECONDS = 5.0
_CLIENT = "kvmesh-router"


@dataclass(frozen=True, slots=True)
class Made:
    """A decision and the router that made it; `epoch` is that one's life."""

    router: str
    epoch: str
    decision: RoutingDecision


Show = Callable[[Made], None]
"""Gets a decision. May block: then so does the reading."""

Notice = Callable[[str], None]
"""Gets what is to be known beside the decisions, in a sentence."""


async def remembered(
    members: Sequence[Member], config: RpcConfig, query: DecisionQuery, notice: Notice
) -> list[Made]:
    """Return what all routers remember, oldest first, the newest `query.limit` of it.

    Routers that don't answer are told of. Raises CommandError if no router is there, or
    none of them answers.
    """
    routers = [member for member in members if member.role is Role.ROUTER]
    if not routers:
        raise CommandError("no router runs here: `kvmesh status` shows what does")
    query = replace(query, follow=False)
    answers = await asyncio.gather(*(_ask(router, query, config) for router in routers))
    failures = [answer for answer in answers if isinstance(answer, str)]
    if len(failures) == len(routers):
        raise CommandError("; ".join(failures))
    for failure in failures:
        notice(failure)
    made = [one for answer in answers if not isinstance(answer, str) for one in answer]
    made.sort(key=lambda one: one.decision.time)
    return made if query.limit is None else made[len(made) - min(query.limit, len(made)) :]


async def follow(
    own: OwnConfig, query: DecisionQuery, shown: Sequence[Made], show: Show, notice: Notice
) -> None:
    """Show what routers decide beyond what is `shown`; also those that come later.

    Runs until it is cancelled. A slow `show` holds up the reading, and routers drop then.
    """
    last: dict[tuple[str, str], int] = {}
    for one in shown:
        last[one.router, one.epoch] = max(one.decision.number, last.get((one.router, one.epoch), 0))
    query = replace(query, follow=True, limit=None)
    followed: set[tuple[str, str]] = set()
    async with (
        create(own.discovery, SystemClock(), random.Random()) as discovery,
        aclosing(discovery.watch()) as updates,  # type: ignore[type-var]
        asyncio.TaskGroup() as tasks,
    ):
        async for members in updates:
            for member in members:
                life = (member.id, member.epoch)
                if member.role is Role.ROUTER and life not in followed:
                    followed.add(life)
                    news = _news(member, query, own.rpc, last.get(life, 0), notice)
                    tasks.create_task(_pass_on(news, show))


async def _ask(router: Member, query: DecisionQuery, config: RpcConfig) -> list[Made] | str:
    """Return what one router remembers, or what is wrong with it."""
    made: list[Made] = []
    try:
        async with (
            asyncio.timeout(_ROUTER_SECONDS),
            _peer(router, config) as peer,
            aclosing(watch_decisions(peer, query)) as answers,
        ):
            async for _, decisions in answers:
                made += [Made(router.id, router.epoch, decision) for decision in decisions]
    except MeshError as error:
        return f"{router.id}: {error.message}"
    except TimeoutError:
        return f"{router.id} does not answer"
    return made


async def _news(
    router: Member, query: DecisionQuery, config: RpcConfig, last: int, notice: Notice
) -> AsyncGenerator[Made, None]:
    """Yield what one life of a router decides after its decision `last`, until it ends."""
    try:
        async with (
            _peer(router, config) as peer,
            aclosing(watch_decisions(peer, query)) as answers,
        ):
            async for dropped, decisions in answers:
                if dropped:
                    notice(f"{router.id}: {dropped} decisions were too many to follow")
                for decision in decisions:
                    if decision.number > last:
                        yield Made(router.id, router.epoch, decision)
    except MeshError as error:
        notice(f"{router.id}: {error.message}")


async def _pass_on(news: AsyncGenerator[Made, None], show: Show) -> None:
    async with aclosing(news) as made:
        async for one in made:
            show(one)


@asynccontextmanager
async def _peer(router: Member, config: RpcConfig) -> AsyncIterator[Peer]:
    peer = Peer(Worker(router.id, router.epoch, router.address), _CLIENT, config)
    try:
        yield peer
    finally:
        await peer.aclose()
