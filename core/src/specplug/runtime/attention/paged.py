"""Paged attention whose lengths, pages and masks are all on the device, so that nothing has to be planned.

Two forms of each function: plain torch, which is the definition, and Triton, taken on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specplug.runtime.device.rows import StepRows

Sees = Literal["causal", "full", "words", "visible"]


@dataclass(frozen=True, slots=True)
class PagedQueries:
    """R rows of queries over a page table, and which keys each query sees. Device tensors, int64 but where said.

    A row's queries lie at the token indices from ``first + offset`` on, its *base*, and every one of them
    sees the keys below the base. Of the keys at and above it a query sees, by `sees`:

    - ``causal``: those up to its own index;
    - ``full``: those of all queries of its row;
    - ``words``: as `ancestors` says, if it is one of the `drafted` last of its row; else as ``causal``;
    - ``visible``: as `visible` says.

    A window counts positions: a query's is its token index under ``causal`` and ``full``, else `positions`
    says it; a key's is its token index, and for a row's own keys under ``words`` `positions`. Under
    ``visible`` a window cuts only what lies below the base.
    """

    tables: Tensor  # [S+1, P]  int32 page ids of each slot
    page_size: int
    slots: Tensor  # [R]
    first: Tensor  # [R]
    offset: int = 0
    row_start: Tensor | None = None
    """[R+1]: row r owns the queries row_start[r]:row_start[r+1], all others are padding. None: `q_len` each."""
    q_len: int = 0
    sees: Sees = "causal"
    drafted: Tensor | None = None  # [R]  words: drafts at the end of each row
    ancestors: Tensor | None = None  # [T, W]  words: bit j of the words: a draft sees its row's token j
    positions: Tensor | None = None  # [T]  words; visible with a window: position of each query
    visible: Tensor | None = None  # bool [R, q_len, X]  visible: key ``base + x`` is seen

    @property
    def capacity(self) -> int:
        """Tokens that a slot's pages hold at most; nothing is read beyond them."""
        return self.tables.shape[1] * self.page_size


def step_queries(rows: StepRows, *, trees: bool) -> PagedQueries:
    """Return a step's own queries; `trees`: its drafts see their ancestors, else all before them in the row."""
    words = trees and rows.ancestors is not None
    return PagedQueries(
        rows.tables,
        rows.page_size,
        rows.slots,
        rows.begin,
        row_start=rows.row_start,
        sees="words" if words else "causal",
        drafted=rows.drafted if words else None,
        ancestors=rows.ancestors if words else None,
        positions=rows.positions if words else None,
    )


def paged_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: PagedQueries,
    *,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    below_lse: Tensor | None = None,
) -> Tensor:
    """Attend with `q` [T, q_heads, k_dim] over one layer's pool; returns [T, q_heads, v_dim], in `out` if given.

    `keys` [rows, kv_heads, k_dim] and `values` [rows, kv_heads, v_dim] are any pool whose pages `queries.tables`
    names. A query that sees nothing, and padding, gives zeros. `scale` defaults to ``k_dim ** -0.5``.

    `below_lse` float32 [T, q_heads] goes on from what another kernel made of the keys below each row's base:
    `out` holds its result and `below_lse` the base-2 logarithms of its sums of exponentials. Then only keys at and
    above the base are read, of rows with drafts, and the other rows keep what `out` holds. ``words`` only.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if out is None:
        out = torch.empty(q.shape[0], q.shape[1], values.shape[2], dtype=q.dtype, device=q.device)
    if q.is_cuda:
        from specplug.runtime.attention.paged_triton import attend

        attend(q, keys, values, queries, window, scale, out, below_lse)
    else:
        _attend(q, keys, values, queries, window, scale, out, below_lse)
    return out


def paged_write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, kv_rows: Tensor) -> None:
    """Write `k` [T, kv_heads, k_dim] and `v` [T, kv_heads, v_dim], views with any strides, to pool rows `kv_rows` [T].

    Several tokens may go to the trash row; what it holds afterwards is any of theirs.
    """
    if keys.is_cuda:
        from specplug.runtime.attention.paged_triton import write

        write(keys, values, k, v, kv_rows)
    else:
        keys.index_copy_(0, kv_rows, k)
        values.index_copy_(0, kv_rows, v)


def paged_write_at(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, index: Tensor, rows: StepRows, trash_row: int
) -> None:
    """Write to the token indices `index`, [R, q_len] or [T]: of each row, or of the row of each token.

    What lies below 0 or beyond the page table, and pad tokens, go to the pool row `trash_row`.
    """
    if keys.is_cuda:
        from specplug.runtime.attention.paged_triton import write_at

        write_at(keys, values, k, v, index, rows, trash_row)
        return
    if index.ndim == 1:
        pad = rows.token_row >= rows.rows
        slots = rows.slots[rows.token_row.clamp_max(rows.rows - 1)]
        index = torch.where(pad, -1, index)
    else:
        slots = rows.slots[:, None]
    page, columns = index // rows.page_size, rows.tables.shape[1]
    at = rows.tables[slots, page.clamp(0, columns - 1)].long() * rows.page_size + index % rows.page_size
    at = torch.where((index < 0) | (page >= columns), trash_row, at)
    paged_write(keys, values, k, v, at.flatten())


def seen_keys(queries: PagedQueries, row: int, start: int, stop: int, window: int | None) -> Tensor:
    """Return bool [q, X]: which token indices from 0 on the queries `start` to `stop`, those of `row`, see."""
    count = stop - start
    base = int(queries.first[row]) + queries.offset
    beyond = queries.visible.shape[2] if queries.visible is not None else count
    query = torch.arange(count, device=queries.first.device)
    key = torch.arange(min(max(base + beyond, 0), queries.capacity), device=query.device)
    own = key - base  # below 0: not of the row's own
    position, key_position = base + query, key
    seen = own <= query[:, None]
    if queries.sees == "full":
        seen = torch.ones_like(seen)
    elif queries.sees == "words":
        assert queries.drafted is not None
        assert queries.ancestors is not None
        assert queries.positions is not None
        places = own.clamp(0, queries.ancestors.shape[1] * 64 - 1)
        bits = queries.ancestors[start:stop, places // 64] >> (places % 64) & 1
        draft = query >= count - int(queries.drafted[row])
        seen = torch.where(draft[:, None], (bits == 1) | (own < 0), seen)
        position = queries.positions[start:stop]
        key_position = torch.where(own < 0, key, queries.positions[start:stop][own.clamp(0, count - 1)])
    elif queries.sees == "visible":
        assert queries.visible is not None
        seen = torch.ones_like(seen)
        seen[:, base:] = queries.visible[row, :, : max(len(key) - base, 0)]
    if window is not None:
        if queries.sees == "visible":
            assert queries.positions is not None
            position = queries.positions[start:stop]
        near = key_position > position[:, None] - window
        seen = seen & ((near | (own >= 0)) if queries.sees == "visible" else near)
    return seen


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: PagedQueries,
    window: int | None,
    scale: float,
    out: Tensor,
    below_lse: Tensor | None,
) -> None:
    """The definition of `paged_attend`, row by row in float32."""
    rows, kv_heads = len(queries.slots), keys.shape[1]
    starts = [row * queries.q_len for row in range(rows + 1)]
    if queries.row_start is not None:
        starts = queries.row_start.tolist()
    if below_lse is None:
        out[starts[-1] :] = 0
    for row in range(rows):
        mine = slice(starts[row], starts[row + 1])
        if mine.start == mine.stop:
            continue
        seen = seen_keys(queries, row, mine.start, mine.stop, window)
        if below_lse is not None:
            assert queries.drafted is not None
            if not queries.drafted[row]:
                continue
            seen[:, : int(queries.first[row]) + queries.offset] = False
        # What no query sees is not read: it may hold anything, and 0 x NaN is NaN.
        index = torch.nonzero(seen.any(0)).flatten()
        pages = queries.tables[queries.slots[row], index // queries.page_size].long()
        at = pages * queries.page_size + index % queries.page_size
        heads = q[mine].float().reshape(mine.stop - mine.start, kv_heads, -1, q.shape[2])
        scores = torch.einsum("qhgd,xhd->qhgx", heads, keys[at].float()) * scale
        scores = scores.masked_fill(~seen[:, None, None, index], -torch.inf).flatten(1, 2)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp().view(*heads.shape[:3], -1)
        found = torch.einsum("qhgx,xhd->qhgd", weights, values[at].float()).flatten(1, 2)
        if below_lse is not None:
            share = torch.sigmoid(lse - below_lse[mine] * torch.log(torch.tensor(2.0)))[..., None]
            found = share * found + (1 - share) * out[mine].float()
        out[mine] = found.to(out.dtype)
