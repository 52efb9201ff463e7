"""Packed linear layers and the workspace: other layouts, the same numbers."""

from typing import Any

import pytest
import torch

from kvmesh.engine.base import EngineRequest
from kvmesh.engine.sequence import Kind, Limits
from kvmesh.engine.torch.memory import KvShape
from kvmesh.engine.torch.packing import pack
from kvmesh.engine.torch.plan import Span
from kvmesh.engine.torch.sequence import TorchSequence
from kvmesh.engine.torch.workspace import Workspace
from kvmesh.types import Sampling

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32)
SIZE = 4
LIMITS = Limits(10, 1 << 20, frozenset(), 10)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_give_the_same(rows: int, bias: bool) -> None:
    with torch.inference_mode():
        plain = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=bias))
        packed = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=bias))
        packed.load_state_dict(plain.state_dict())
        pack(packed)
        given = torch.randn(1, rows, 24)
        torch.testing.assert_close(packed(given), plain(given))


def test_other_layers_are_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).to(torch.bfloat16), torch.nn.ReLU())
    pack(model)
    assert all("forward" not in vars(module) for module in model)


class Pool:
    """A pool of random KV, and sequences in it."""

    def __init__(self) -> None:
        self.kv = torch.randn(64, SHAPE.layers, 2, SIZE, SHAPE.kv_heads, SHAPE.head_dim)
        self._free = list(torch.randperm(64).tolist())

    def span(self, tokens: int) -> Span:
        """Return the newest token of a new sequence that has that many before it."""
        request = EngineRequest("r", [1] * (tokens + 1), Sampling())
        sequence = TorchSequence(request, Kind.GENERATE, None, lambda _: None, LIMITS)
        blocks = [self._free.pop() for _ in range(tokens // SIZE + 1)]
        return Span(sequence, blocks, tokens, 1, picks=True)

    def lined(self, span: Span) -> Any:
        """Return what a sequence has, [layers, 2, kv_heads, tokens, head_dim]."""
        found = torch.cat([self.kv[block] for block in span.blocks], dim=2)
        return found[:, :, : span.first].transpose(2, 3)


def following(span: Span) -> Span:
    return Span(span.sequence, span.blocks, span.first + 1, 1, picks=True)


def check(pool: Pool, workspace: Workspace, spans: list[Span]) -> None:
    """Seat spans; each must find what it has, and its newest token gets a place behind."""
    seated, left = workspace.seat(pool.kv, spans)
    assert left == []
    assert {id(span) for _, rows in seated for span in rows} == set(map(id, spans))
    for shelf, rows in seated:
        for row, span in enumerate(rows):
            held = shelf.kv[:, :, row, :, : span.first]
            assert torch.equal(held, pool.lined(span))
            block, place = span.blocks[span.first // SIZE], span.first % SIZE
            shelf.kv[:, :, row, :, span.first] = pool.kv[block, :, :, place]


def test_sequences_come_go_and_grow() -> None:
    pool, workspace = Pool(), Workspace(SHAPE, 1 << 24)
    a, b, c, d, e = (pool.span(tokens) for tokens in (5, 1, 12, 30, 3))
    check(pool, workspace, [a, b, c])
    a, c = following(a), following(c)
    check(pool, workspace, [a, c])  # the second leaves
    a, c = following(a), following(c)
    check(pool, workspace, [c, a, d, b, e])  # and comes back: more than a shelf had


def test_what_went_on_elsewhere_is_read_anew() -> None:
    pool, workspace = Pool(), Workspace(SHAPE, 1 << 24)
    one = pool.span(5)
    check(pool, workspace, [one])
    check(pool, workspace, [following(following(one))])


def test_lengths_have_shelves_of_their_own() -> None:
    pool, workspace = Pool(), Workspace(SHAPE, 1 << 24)
    spans = [pool.span(3), pool.span(100)]
    long = Span(spans[1].sequence, spans[1].blocks * 20, 300, 1, picks=True)
    seated, left = workspace.seat(pool.kv, [spans[0], long])
    assert [shelf.capacity for shelf, _ in seated] == [256, 512]
    assert left == []


def test_what_does_not_fit_is_left() -> None:
    pool = Pool()
    enough = 4 * 256 * SHAPE.token_bytes
    span = pool.span(3)
    assert Workspace(SHAPE, enough - 1).seat(pool.kv, [span]) == ([], [span])
    assert Workspace(SHAPE, enough).seat(pool.kv, [span])[1] == []
