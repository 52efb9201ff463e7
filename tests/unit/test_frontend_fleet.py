"""Which models can be served, and whose turn it is."""

import random
from collections.abc import AsyncIterator

import pytest

from kvmesh.errors import UnavailableError, UnknownModelError
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import PeerPool
from kvmesh.types import Member, Role, State
from services.frontend.fleet import Fleet


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with PeerPool.open("test", RpcConfig()) as pool:
        yield Fleet(pool, random.Random(0))


def member(
    role: Role,
    number: int = 0,
    *,
    model: str = "m",
    state: State = State.READY,
    context_length: int = 100,
) -> Member:
    name = f"{role}-{number}"
    return Member(
        name,
        role,
        "e",
        f"{name}:1",
        state,
        model=model if role is not Role.ROUTER else "",
        block_size=16,
        context_length=context_length if role is Role.DECODE else 0,
    )


def test_a_model_needs_a_tokenizer_and_a_decode_worker(fleet: Fleet) -> None:
    tokenizer, decode = member(Role.TOKENIZER), member(Role.DECODE)
    fleet.update([tokenizer])
    assert fleet.models() == ()
    fleet.update([decode, member(Role.PREFILL)])
    assert fleet.models() == ()
    fleet.update([tokenizer, decode])
    assert [model.name for model in fleet.models()] == ["m"]
    assert fleet.model("m").block_size == 16


def test_a23_known_is_not_unknown(fleet: Fleet) -> None:
    with pytest.raises(UnknownModelError):
        fleet.model("m")
    fleet.update([member(Role.DECODE, state=State.STARTING)])
    with pytest.raises(UnavailableError) as caught:
        fleet.model("m")
    assert caught.value.retry_after
    fleet.update([])
    with pytest.raises(UnavailableError):
        fleet.model("m")
    with pytest.raises(UnknownModelError):
        fleet.model("other")


def test_the_smallest_context_counts(fleet: Fleet) -> None:
    fleet.update(
        [
            member(Role.TOKENIZER),
            member(Role.DECODE, 1, context_length=200),
            member(Role.DECODE, 2, context_length=50),
            member(Role.DECODE, 3, context_length=0),
            member(Role.DECODE, 4, context_length=10, state=State.DRAINING),
        ]
    )
    assert fleet.model("m").context_length == 50


def test_routers_and_tokenizers_take_turns(fleet: Fleet) -> None:
    members = [member(role, n) for role in (Role.TOKENIZER, Role.ROUTER) for n in range(3)]
    fleet.update([*members, member(Role.DECODE)])
    model = fleet.model("m")
    for ask in (fleet.routers, lambda: fleet.tokenizers(model)):
        orders = [[peer.worker.id[-1] for peer in ask()] for _ in range(3)]
        assert {order[0] for order in orders} == {"0", "1", "2"}
        assert all(sorted(order) == ["0", "1", "2"] for order in orders)


def test_the_least_busy_worker_is_chosen(fleet: Fleet) -> None:
    fleet.update([member(Role.TOKENIZER), *(member(Role.DECODE, n) for n in range(3))])
    model = fleet.model("m")
    fleet.decoding.update({"decode-0": 2, "decode-1": 1, "decode-2": 1})
    chosen = {fleet.least_busy(model, ()).id for _ in range(30)}
    assert chosen == {"decode-1", "decode-2"}
    assert fleet.least_busy(model, ("decode-1", "decode-2")).id == "decode-0"
    with pytest.raises(UnavailableError):
        fleet.least_busy(model, ("decode-0", "decode-1", "decode-2"))
    fleet.update([member(Role.TOKENIZER), member(Role.DECODE, 0)])
    assert fleet.least_busy(model, ()).id == "decode-0"


def test_routers_and_tokenizers_take_turns_apart(fleet: Fleet) -> None:
    two = [member(role, at) for role in (Role.TOKENIZER, Role.ROUTER) for at in range(2)]
    fleet.update([*two, member(Role.DECODE)])
    model = fleet.model("m")
    asked = [(fleet.tokenizers(model)[0], fleet.routers()[0]) for _ in range(4)]
    assert len({tokenizer for tokenizer, _ in asked}) == 2
    assert len({router for _, router in asked}) == 2
