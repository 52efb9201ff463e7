"""Lays a step's tokens out for the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvmesh.engine.torch.attention import Chunk, Group, PagedAttention, PagedGroup
from kvmesh.engine.torch.plan import Span
from kvmesh.engine.torch.workspace import ShelfGroup, Workspace

_SPREAD = 2  # lengths in one group differ by at most this factor


@dataclass(frozen=True, slots=True)
class Laid:
    """A step as tensors: one row of tokens, and the places in it whose logits are needed.

    `spans` are the step's, in the order of their rows. `keep` has first the places behind
    which a token is picked, then those behind which one of a prompt is scored.
    """

    spans: Sequence[Span]
    token_ids: Any
    positions: Any
    keep: Any
    attention: PagedAttention


def lay(spans: Sequence[Span], kv: Any, workspace: Workspace | None) -> Laid:
    """Return the tensors for `spans`, on the device of `kv`, the pool."""
    ordered, groups = _groups(spans, kv, workspace)
    chunks, row = [], len(ordered)
    for span in spans:
        if not _decodes(span):
            ordered.append(span)
            chunks.append(_chunk(span, row, kv))
            row += span.count
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    picks: list[int] = []
    scores: list[int] = []
    size = kv.shape[3]
    for span in ordered:
        scores += (len(token_ids) + at - span.first for at in span.scores)
        token_ids += span.token_ids
        positions += range(span.first, span.length)
        blocks += (span.blocks[at // size] for at in range(span.first, span.length))
        if span.picks:
            picks.append(len(token_ids) - 1)
    device = kv.device
    placed = torch.tensor(positions, device=device)
    return Laid(
        spans=ordered,
        token_ids=torch.tensor([token_ids], device=device),
        positions=placed.unsqueeze(0),
        keep=torch.tensor(picks + scores, dtype=torch.long, device=device),
        attention=PagedAttention(
            kv, (torch.tensor(blocks, device=device), placed % size), groups, chunks
        ),
    )


def _decodes(span: Span) -> bool:
    return span.count == 1 and span.first > 0


def _groups(
    spans: Sequence[Span], kv: Any, workspace: Workspace | None
) -> tuple[list[Span], list[Group]]:
    """Return the spans of one token in row order, and their groups."""
    ordered: list[Span] = []
    groups: list[Group] = []
    left = [span for span in spans if _decodes(span)]
    if workspace is not None:
        shelved, left = workspace.seat(kv, left)
        for shelf, rows in shelved:
            groups.append(
                ShelfGroup(
                    start=len(ordered),
                    stop=len(ordered) + len(rows),
                    mask=_mask(rows, kv),
                    kv=shelf.kv,
                    rows=torch.arange(len(rows)),
                    places=torch.tensor([span.first for span in rows]),
                    tokens=max(span.length for span in rows),
                )
            )
            ordered += rows
    for rows in _alike(left):
        groups.append(
            PagedGroup(
                start=len(ordered),
                stop=len(ordered) + len(rows),
                mask=_mask(rows, kv),
                table=_table(rows, kv),
                tokens=rows[-1].length,
            )
        )
        ordered += rows
    return ordered, groups


def _alike(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans in groups of similar length, so that little is padded."""
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.length):
        if groups and span.length <= _SPREAD * groups[-1][0].length:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _mask(rows: Sequence[Span], kv: Any) -> Any:
    """Return what hides from each row what is behind its end; None if there is nothing."""
    lengths = [span.length for span in rows]
    if min(lengths) == max(lengths):
        return None
    beyond = torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)
    return _hide(beyond, kv)[:, None, None]


def _table(rows: Sequence[Span], kv: Any) -> Any:
    size = kv.shape[3]
    used = [span.blocks[: -(-span.length // size)] for span in rows]
    widest = max(map(len, used))
    table = [[*blocks, *[0] * (widest - len(blocks))] for blocks in used]
    return torch.tensor(table, device=kv.device)


def _chunk(span: Span, row: int, kv: Any) -> Chunk:
    stop = row + span.count
    if span.first == 0:
        return Chunk(row, stop, span.length)
    seen = torch.arange(span.first, span.length).unsqueeze(1)
    ahead = torch.arange(span.length) > seen
    return Chunk(row, stop, span.length, _table([span], kv), _hide(ahead, kv))


def _hide(where: Any, kv: Any) -> Any:
    mask = torch.zeros(where.shape, dtype=kv.dtype)
    return mask.masked_fill_(where, -torch.inf).to(kv.device)
