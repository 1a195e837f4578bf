"""Attention in plain torch: the CPU's backend, and the oracle of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specplug import tree
from specplug.models.base import KVGeometry
from specplug.runtime.kv import KVPool, PagePool


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One row of queries: `q_len` tokens at the indices from `kv_len` on, all of which see what is below.

    Set by the engine for a step's rows, and by `PagedView` for a drafter's patterns.
    """

    slot: int
    kv_len: int
    q_len: int
    parents: Sequence[int] | None = None
    """Drafts below the first query, for a tree; None: each query sees itself and those before it."""
    beyond: Tensor | None = None
    """bool [q_len, X]: which of the rows ``kv_len + x`` each query sees, in place of the causal rule."""
    placed: Sequence[int] | None = None
    """Positions of the queries, counted from `kv_len`, where neither order nor `parents` says them."""
    scattered: bool = False
    """The rows of `beyond` lie in no order of positions: a window does not count them."""

    @property
    def causal(self) -> bool:
        """Whether each query sees what is below, itself and the queries before it, at the positions in that order."""
        chain = self.parents is None or tree.is_chain(self.parents)
        return chain and self.beyond is None and self.placed is None

    @property
    def depths(self) -> Sequence[int]:
        """Positions of the queries, counted from `kv_len`."""
        if self.placed is not None:
            return self.placed
        return [0, *tree.depths(self.parents)] if self.parents is not None else list(range(self.q_len))

    @property
    def mask(self) -> Tensor:
        """bool [q_len, X]: what each query sees at and above `kv_len`."""
        if self.beyond is not None:
            return self.beyond
        if self.parents is not None:
            return tree.ancestor_mask(self.parents)
        return torch.ones(self.q_len, self.q_len, dtype=torch.bool).tril()


@dataclass(slots=True)
class _Group:
    """Rows of equal q_len, attended in one call; padded to the longest KV among them."""

    queries: Tensor | None  # which of the T queries, row after row; None: all
    gather: Tensor  # [G * K] pool rows, row after row
    size: int  # G
    q_len: int
    query_position: Tensor  # [G, q_len]
    key_position: Tensor  # [G, K]
    visible: Tensor | None  # bool [G, 1, q_len, K]; None: everything


class RowPlan:
    """Which pool rows each query of some rows sees: made once, used for every layer.

    Rows of different widths stay apart, so none widens the others.
    """

    def __init__(self, rows: Sequence[AttentionRow], pages: PagePool) -> None:
        self._starts = np.cumsum([0, *(row.q_len for row in rows)])
        placed = list(zip(rows, self._starts.tolist(), strict=False))
        widths = sorted({row.q_len for row in rows})
        self._groups = [_group([at for at in placed if at[0].q_len == width], pages) for width in widths]
        if len(self._groups) == 1:
            self._groups[0].queries = None
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def attend(
        self, keys: Tensor, values: Tensor, geometry: KVGeometry, q: Tensor, scale: float | None = None
    ) -> Tensor:
        """Return [T, q_heads, v_dim] for `q` [T, q_heads, k_dim] over the pools `keys` and `values` of one layer."""
        heads = q.shape[1]
        out = q.new_empty(len(q), heads, geometry.v_dim) if len(self._groups) > 1 else None
        for at, group in enumerate(self._groups):
            mine = q if group.queries is None else q[group.queries]
            shape = (group.size, -1, geometry.kv_heads)
            attended = scaled_dot_product_attention(
                mine.reshape(group.size, group.q_len, heads, -1).transpose(1, 2),
                keys.index_select(0, group.gather).view(*shape, geometry.k_dim).transpose(1, 2),
                values.index_select(0, group.gather).view(*shape, geometry.v_dim).transpose(1, 2),
                attn_mask=self._mask(at, geometry.window),
                scale=scale,
                enable_gqa=heads != geometry.kv_heads,
            )
            flat = attended.transpose(1, 2).reshape(group.size * group.q_len, heads, -1)
            if out is None:
                return flat
            assert group.queries is not None
            out[group.queries] = flat
        assert out is not None
        return out

    def _mask(self, at: int, window: int | None) -> Tensor | None:
        """What each query sees; a window counts positions, in which a tree's siblings are equal."""
        if window is None:
            return self._groups[at].visible
        if (at, window) not in self._masks:
            group = self._groups[at]
            near = group.key_position.unsqueeze(1) > group.query_position.unsqueeze(2) - window
            near = near.unsqueeze(1)
            self._masks[at, window] = near if group.visible is None else near & group.visible
        return self._masks[at, window]


class TorchAttention:
    """The `AttentionStep` of one step over the target's KV."""

    def __init__(self, rows: Sequence[AttentionRow], pages: PagePool, pool: KVPool) -> None:
        self._pool = pool
        self._plan = RowPlan(rows, pages)
        self._write = torch.from_numpy(
            np.concatenate([pages.rows(row.slot, row.kv_len, row.kv_len + row.q_len) for row in rows])
        )

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.models.base.AttentionStep`."""
        keys, values = self._pool.k[layer], self._pool.v[layer]
        if k is not None and v is not None:
            keys.index_copy_(0, self._write, k)
            values.index_copy_(0, self._write, v)
        return self._plan.attend(keys, values, self._pool.layers[layer], q, scale)


def _group(rows: Sequence[tuple[AttentionRow, int]], pages: PagePool) -> _Group:
    q_len = rows[0][0].q_len
    starts = np.array([start for _, start in rows])[:, None]
    # In numpy and for all rows at once: made anew for every step and pattern, this is a good part of a small step.
    slots, kv_len = np.array([(row.slot, row.kv_len) for row, _ in rows]).T[:, :, None]
    masks = {at: row.mask.numpy() for at, (row, _) in enumerate(rows) if not row.causal}
    totals = kv_len + q_len
    for at, mask in masks.items():
        totals[at] = kv_len[at] + mask.shape[1]
    index = np.arange(totals.max())
    gather = pages.rows_of(slots, index)
    gather = np.where(index < totals, gather, gather[:, :1])  # masked; of its own, lest a neighbour's NaN is 0 x NaN
    query_position = kv_len + np.arange(q_len)
    visible = index <= query_position[:, :, None]
    key_position = index[None].repeat(len(rows), 0)
    for at, mask in masks.items():
        row, total = rows[at][0], int(totals[at, 0])
        visible[at, :, row.kv_len :] = False
        visible[at, :, row.kv_len : total] = mask
        query_position[at] = row.kv_len + np.array(row.depths)
        if row.scattered:
            key_position[at, row.kv_len :] = np.iinfo(np.int64).max
        elif row.beyond is None:
            key_position[at, row.kv_len : total] = query_position[at]
    return _Group(
        queries=torch.from_numpy((starts + np.arange(q_len)).reshape(-1)),
        gather=torch.from_numpy(gather.reshape(-1)),
        size=len(rows),
        q_len=q_len,
        query_position=torch.from_numpy(query_position),
        key_position=torch.from_numpy(key_position),
        visible=None if visible.all() else torch.from_numpy(visible[:, None]),
    )
