"""Attention over paged KV, as transformers' models call it.

A step's tokens come packed into one row, sequence after sequence; who may look at whom is
the matter of the `Attention` that is given to the model's forward as `ATTENTION`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

IMPLEMENTATION = "kvmesh_paged"
ATTENTION = "kvmesh_attention"
"""Keyword of a model's forward under which the attention comes."""

# What a model may ask of attention by keyword that changes its result.
_VARIANTS = ("sliding_window", "softcap", "s_aux", "position_bias")


class Attention(Protocol):
    """Computes the attention of one layer. Shapes: [tokens, heads, head_dim]."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, scaling: float | None) -> Any:
        """Return the output, shaped like `query` (with the values' head_dim)."""
        ...

    def asked(self, variants: Sequence[tuple[str, object]]) -> None:
        """Hear what variants of attention the layer wants, if any, before `attend`."""
        ...


def register() -> None:
    """Make the attention known to transformers. Idempotent.

    No mask function is registered beside it: then transformers makes no mask.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _forward)


def _forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend as transformers' attention interface asks: [1, heads, tokens, head_dim] in."""
    attention: Attention = kwargs[ATTENTION]
    attention.asked([(name, kwargs[name]) for name in _VARIANTS if kwargs.get(name) is not None])
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    output = attention.attend(module.layer_idx, query, key, value, kwargs.get("scaling"))
    return output.unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring tokens of one sequence: rows `start` to `stop` of a step.

    `table`, [1, blocks], are the blocks of all its `tokens` up to here and `mask`, [rows,
    tokens], is added to the scores; both are None where the rows are all there is.
    """

    start: int
    stop: int
    tokens: int
    table: Any = None
    mask: Any = None


class Group(Protocol):
    """Rows `start` to `stop` of a step, each the newest token of a sequence of its own.

    `mask`, [rows, 1, 1, tokens], is added to the scores; None where all see everything.
    """

    @property
    def start(self) -> int:
        """The first row."""
        ...

    @property
    def stop(self) -> int:
        """The row behind the last."""
        ...

    @property
    def mask(self) -> Any:
        """What to add to the scores."""
        ...

    def past(self, layer: int, kv: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """Return keys and values, [rows, kv_heads, tokens, head_dim], the newest included.

        `kv` is that layer's [blocks, 2, block_size, kv_heads, head_dim], where the newest
        are by now; `key` and `value` are the newest of these rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """A `Group` whose KV is gathered at each step. `table` is [rows, blocks]."""

    start: int
    stop: int
    mask: Any
    table: Any
    tokens: int

    def past(self, layer: int, kv: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """Return copies."""
        keys, values = (gather(kv[:, which], self.table) for which in (0, 1))
        return keys[:, : self.tokens].transpose(1, 2), values[:, : self.tokens].transpose(1, 2)


class PagedAttention:
    """The attention of one step. `kv` is [blocks, layers, 2, block_size, kv_heads, head_dim].

    `slots` are block and place of each row.
    """

    def __init__(
        self,
        kv: Any,
        slots: tuple[Any, Any],
        groups: Sequence[Group],
        chunks: Sequence[Chunk],
    ) -> None:
        self._kv = kv
        self._slots = slots
        self._groups = groups
        self._chunks = chunks

    def asked(self, variants: Sequence[tuple[str, object]]) -> None:
        """Ignore variants: loading refused those that matter."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, scaling: float | None) -> Any:
        """Store the tokens' KV, then let each look at its own sequence."""
        kv = self._kv[:, layer]
        kv[:, 0].index_put_(self._slots, key)
        kv[:, 1].index_put_(self._slots, value)
        output = torch.empty_like(query)
        for group in self._groups:
            rows = slice(group.start, group.stop)
            past = group.past(layer, kv, key[rows], value[rows])
            output[rows] = decode(query[rows], *past, group.mask, scaling)
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.stop)
            if chunk.table is None:
                past = key[rows], value[rows]
            else:
                keys, values = (gather(kv[:, which], chunk.table)[0] for which in (0, 1))
                past = keys[: chunk.tokens], values[: chunk.tokens]
            output[rows] = prefill(query[rows], *past, chunk.mask, scaling)
        return output


def gather(paged: Any, table: Any) -> Any:
    """Return copies of blocks, in order: [rows, tokens, kv_heads, head_dim].

    `paged` is [blocks, block_size, kv_heads, head_dim], `table` [rows, blocks].
    """
    rows, blocks = table.shape
    found = paged.index_select(0, table.reshape(-1))
    return found.view(rows, blocks * paged.shape[1], *paged.shape[2:])


def decode(query: Any, keys: Any, values: Any, mask: Any, scaling: float | None) -> Any:
    """Return the attention of one token of each of several sequences.

    `query` is [rows, heads, head_dim], `keys` and `values` [rows, kv_heads, tokens, head_dim].
    The heads that share a KV head are its queries, so no KV is repeated.
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[1]
    output = scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, width),
        keys,
        values,
        attn_mask=mask,
        scale=scaling,
    )
    return output.reshape(rows, heads, width)


def prefill(query: Any, keys: Any, values: Any, mask: Any, scaling: float | None) -> Any:
    """Return the attention of several tokens of one sequence: all [tokens, heads, head_dim].

    Without a mask, the tokens are the whole sequence. KV heads are broadcast, not copied.
    """
    tokens, heads, width = query.shape
    kv_heads = keys.shape[1]
    shared = heads // kv_heads
    keys, values = (
        each.transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1) for each in (keys, values)
    )
    output = scaled_dot_product_attention(
        query.transpose(0, 1).reshape(kv_heads, shared, tokens, width),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return output.reshape(heads, tokens, width).transpose(0, 1)
