"""Triton form of `specplug.runtime.attention.paged`.

One program attends with a block of one row's queries, for all query heads of one KV head, over one of
`splits` parts of the row's keys; with more than one part a second kernel merges them. The grid depends
on the padded shapes alone: blocks that turn out to have no queries, and parts without keys, do nothing.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.runtime.attention.paged import PagedQueries
from specplug.runtime.device.rows import StepRows

_MOST_SPLITS = 16
_MOST_ROWS = 64  # row starts that a block reads at least: fewer variants, and they are one load all the same
_LOG2_E = 1.4426950408889634
_MASKS = {"causal": 0, "full": 1, "words": 2, "visible": 3}
# Globals that kernels read must be constexpr.
_FULL = tl.constexpr(1)
_WORDS = tl.constexpr(2)
_VISIBLE = tl.constexpr(3)


# Numbers that differ from bucket to bucket and that no address is computed with would only multiply the variants.
_UNSPECIALIZED = ["rows", "total", "q_len", "offset", "columns", "beyond", "window", "splits"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _attend(
    q, keys, values, out, part_out, part_lse, below_lse,
    tables, slots, first, row_start, drafted, ancestors, positions, visible,
    q_token, q_head, k_row, k_head, v_row, v_head, out_token, out_head,
    rows, total, q_len, offset, columns, beyond, scale, window, splits,
    SEES: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr, GO_ON: tl.constexpr, MERGED: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    WORDS: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    # Which row, and which of its blocks. Row `rows` is the padding behind the last row.
    if RAGGED:
        each = tl.arange(0, BLOCK_R)
        starts = tl.load(row_start + each, mask=each <= rows, other=0)
        # The blocks of row r begin at start // QUERIES + r: room for every row's last, partly filled block.
        before = (each <= rows) & (starts // QUERIES + each <= block)
        row = tl.sum(before.to(tl.int32), 0) - 1
        start = tl.load(row_start + row)
        stop = tl.load(row_start + row + 1, mask=row < rows, other=0)
        stop = tl.where(row < rows, stop, total)
        part = block - start // QUERIES - row
    else:
        per_row = (q_len + QUERIES - 1) // QUERIES
        row = block // per_row
        start = row.to(tl.int64) * q_len
        stop = start + q_len
        part = (block - row * per_row).to(tl.int64)
    real = row < rows
    count = stop - start

    m = tl.arange(0, BLOCK_M)
    local = part * QUERIES + m // GROUP
    token = start + local
    valid = (m < QUERIES * GROUP) & (token < stop)
    query_head = head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_K)
    e = tl.arange(0, BLOCK_V)
    query = tl.load(
        q + token[:, None] * q_token + query_head[:, None] * q_head + d[None, :],
        mask=valid[:, None] & (d < K_DIM)[None, :],
        other=0.0,
    )
    slot = tl.load(slots + row, mask=real, other=0)
    base = tl.load(first + row, mask=real, other=0) + offset
    literal = count
    if SEES == _WORDS:
        literal = count - tl.load(drafted + row, mask=real, other=0)

    # Token indices of the keys to read: those below `end`, not below `lowest`.
    past = tl.minimum((part + 1) * QUERIES, count)  # one past the block's last query
    if SEES == _VISIBLE:
        end = base + beyond
    elif SEES == _FULL:
        end = base + count
    else:  # drafts come after what they see
        end = base + past
    end = tl.minimum(end, columns * PAGE)
    end = tl.where(real & (part * QUERIES < count), tl.maximum(end, 0), 0)
    lowest = end * 0
    position = base + local
    if WINDOW:
        if SEES >= _WORDS:
            position = tl.load(positions + token, mask=valid, other=0)
        lowest = tl.min(tl.where(valid, position, 1 << 40), 0) - window + 1
        if SEES >= _WORDS:
            lowest = tl.minimum(lowest, base)  # where positions lag behind token indices
        lowest = tl.maximum(lowest, 0)
    if GO_ON:
        lowest = base
        end = tl.where(literal < count, end, 0)
    tile_from = lowest // BLOCK_N
    tiles = tl.maximum((end + BLOCK_N - 1) // BLOCK_N - tile_from, 0)
    share = (tiles + splits - 1) // splits
    tile_to = tl.minimum(tile_from + (split + 1) * share, tile_from + tiles)
    tile_from = tile_from + split * share

    where_out = token[:, None] * out_token + query_head[:, None] * out_head + e[None, :]
    held = valid[:, None] & (e < V_DIM)[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if GO_ON:
        top = tl.load(below_lse + token * (HEADS * GROUP) + query_head, mask=valid, other=float("-inf"))
        mass = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = tl.load(out + where_out, mask=held, other=0.0).to(tl.float32)

    for tile in range(tile_from, tile_to):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < end
        page = tl.load(tables + slot * columns + n // PAGE, mask=inside, other=0).to(tl.int64)
        at = page * PAGE + n % PAGE
        key = tl.load(
            keys + at[None, :] * k_row + head * k_head + d[:, None],
            mask=inside[None, :] & (d < K_DIM)[:, None],
            other=0.0,
        )
        score = tl.dot(query, key, input_precision="ieee") * scale
        own = n - base
        seen = own[None, :] <= local[:, None]
        if SEES == _FULL:
            seen = (own[None, :] < count) & valid[:, None]
        if SEES == _WORDS:
            drafts = local >= literal
            among = valid[:, None] & drafts[:, None] & ((own >= 0) & (own < WORDS * 64))[None, :]
            bit = tl.maximum(own, 0)
            word = tl.load(
                ancestors + token[:, None] * WORDS + (bit // 64)[None, :], mask=among & inside[None, :], other=0
            )
            told = ((word >> (bit % 64)[None, :]) & 1) != 0
            seen = (own < 0)[None, :] | ((~drafts)[:, None] & seen) | (drafts[:, None] & told)
        if SEES == _VISIBLE:
            among = valid[:, None] & ((own >= 0) & (own < beyond))[None, :]
            told = tl.load(visible + token[:, None] * beyond + own[None, :], mask=among & inside[None, :], other=0)
            seen = (own < 0)[None, :] | (told != 0)
        if WINDOW:
            key_position = n
            if SEES == _WORDS:
                theirs = tl.load(positions + start + own, mask=inside & (own >= 0) & (own < count), other=0)
                key_position = tl.where(own < 0, n, theirs)
            near = key_position[None, :] > position[:, None] - window
            if SEES == _VISIBLE:
                near = near | (own >= 0)[None, :]
            seen = seen & near
        if GO_ON:
            seen = seen & (own >= 0)[None, :]
        score = tl.where(seen & inside[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: no -inf - -inf
        weight = tl.exp2(score - level[:, None])
        fade = tl.exp2(top - level)
        value = tl.load(
            values + at[:, None] * v_row + head * v_head + e[None, :],
            mask=inside[:, None] & (e < V_DIM)[None, :],
            other=0.0,
        )
        mass = mass * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher

    found = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    if not MERGED:
        tl.store(out + where_out, found.to(out.dtype.element_ty), mask=held)
    else:
        place = (split.to(tl.int64) * total + token) * (HEADS * GROUP) + query_head
        tl.store(part_out + place[:, None] * V_DIM + e[None, :], found, mask=held)
        lse = tl.where(mass > 0, top + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))
        tl.store(part_lse + place, lse, mask=valid)


@triton.jit(do_not_specialize=["total", "splits"])
def _merge(
    part_out, part_lse, out, total, out_token, out_head, splits,
    MOST: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, MOST)
    e = tl.arange(0, BLOCK_V)
    place = (split.to(tl.int64) * total + token) * HEADS + head
    lse = tl.load(part_lse + place, mask=split < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(weight, 0)
    there = (split < splits)[:, None] & (e < V_DIM)[None, :]
    part = tl.load(part_out + place[:, None] * V_DIM + e[None, :], mask=there, other=0.0)
    found = tl.sum(part * weight[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(out + token * out_token + head * out_head + e, found.to(out.dtype.element_ty), mask=e < V_DIM)


@triton.jit(do_not_specialize=["rows", "q_len", "columns", "trash_row"])
def _write(
    keys, values, k, v, where_to, tables, slots, token_row,
    k_token, k_head, v_token, v_head, pool_k_row, pool_k_head, pool_v_row, pool_v_head,
    rows, q_len, columns, page_size, trash_row,
    BY_INDEX: tl.constexpr, FLAT: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(where_to + token)
    if BY_INDEX:
        row = token // q_len
        if FLAT:
            row = tl.load(token_row + token)
        page = at // page_size
        kept = (row < rows) & (at >= 0) & (page < columns)
        slot = tl.load(slots + row, mask=row < rows, other=0)
        held = tl.load(tables + slot * columns + page, mask=kept, other=0).to(tl.int64)
        at = tl.where(kept, held * page_size + at % page_size, trash_row)
    head = tl.arange(0, BLOCK_H)
    if tl.program_id(1) == 0:
        d = tl.arange(0, BLOCK_K)
        held_k = (head < HEADS)[:, None] & (d < K_DIM)[None, :]
        taken_k = tl.load(k + token * k_token + head[:, None] * k_head + d[None, :], mask=held_k)
        tl.store(keys + at * pool_k_row + head[:, None] * pool_k_head + d[None, :], taken_k, mask=held_k)
    else:
        e = tl.arange(0, BLOCK_V)
        held_v = (head < HEADS)[:, None] & (e < V_DIM)[None, :]
        taken_v = tl.load(v + token * v_token + head[:, None] * v_head + e[None, :], mask=held_v)
        tl.store(values + at * pool_v_row + head[:, None] * pool_v_head + e[None, :], taken_v, mask=held_v)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: PagedQueries,
    window: int | None,
    scale: float,
    out: Tensor,
    below_lse: Tensor | None,
) -> None:
    """See `specplug.runtime.attention.paged.paged_attend`; fills `out`."""
    q, keys, values = _dense(q), _dense(keys), _dense(values)
    total, heads, k_dim = q.shape
    rows, kv_heads, v_dim = len(queries.slots), keys.shape[1], values.shape[2]
    if total == 0 or rows == 0:
        out.zero_()
        return
    group = heads // kv_heads
    ragged = queries.row_start is not None
    block_k, block_v = max(16, triton.next_power_of_2(k_dim)), max(16, triton.next_power_of_2(v_dim))
    block_m, block_n = _blocks(group, max(1, total // rows), max(block_k, block_v), q.element_size())
    each = max(1, block_m // group)  # queries of a block
    blocks = total // each + rows + 1 if ragged else rows * -(-queries.q_len // each)
    busy = max(rows, -(-total // each)) * kv_heads
    splits = 1 if below_lse is not None else _splits(busy, -(-queries.capacity // block_n), q.device)
    part_out = part_lse = out
    if splits > 1:
        part_out = torch.empty(splits, total, heads, v_dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, total, heads, dtype=torch.float32, device=q.device)
    unused = queries.slots
    visible = queries.visible.contiguous().view(torch.uint8) if queries.visible is not None else unused
    _attend[(blocks, kv_heads, splits)](
        q, keys, values, out, part_out, part_lse, part_lse if below_lse is None else below_lse,
        queries.tables, queries.slots, queries.first,
        unused if queries.row_start is None else queries.row_start,
        unused if queries.drafted is None else queries.drafted,
        unused if queries.ancestors is None else queries.ancestors,
        unused if queries.positions is None else queries.positions,
        visible,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1),
        rows, total, queries.q_len, queries.offset, queries.tables.shape[1],
        0 if queries.visible is None else queries.visible.shape[2],
        scale * _LOG2_E, 0 if window is None else window, splits,
        SEES=_MASKS[queries.sees], RAGGED=ragged, WINDOW=window is not None, GO_ON=below_lse is not None,
        MERGED=splits > 1, PAGE=queries.page_size, GROUP=group, HEADS=kv_heads, K_DIM=k_dim, V_DIM=v_dim,
        WORDS=0 if queries.ancestors is None else queries.ancestors.shape[1], QUERIES=each,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_V=block_v,
        BLOCK_R=max(_MOST_ROWS, triton.next_power_of_2(rows + 1)) if ragged else 1,
        num_warps=8 if max(block_k, block_v) >= 512 else 4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge[(total, heads)](
            part_out, part_lse, out, total, out.stride(0), out.stride(1), splits,
            MOST=_MOST_SPLITS, HEADS=heads, V_DIM=v_dim, BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip


def write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, kv_rows: Tensor) -> None:
    """See `specplug.runtime.attention.paged.paged_write`."""
    _launch_write(keys, values, k, v, kv_rows, None, 0)


def write_at(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, index: Tensor, rows: StepRows, trash_row: int) -> None:
    """See `specplug.runtime.attention.paged.paged_write_at`."""
    _launch_write(keys, values, k, v, index.contiguous(), rows, trash_row)


def _launch_write(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, where_to: Tensor, rows: StepRows | None, trash_row: int
) -> None:
    k, v = _dense(k), _dense(v)
    total, heads, k_dim = k.shape
    v_dim = v.shape[2]
    if total == 0:
        return
    _write[(total, 2)](
        keys, values, k, v, where_to,
        where_to if rows is None else rows.tables,
        where_to if rows is None else rows.slots,
        where_to if rows is None else rows.token_row,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        0 if rows is None else rows.rows, where_to.shape[-1],
        0 if rows is None else rows.tables.shape[1], 1 if rows is None else rows.page_size, trash_row,
        BY_INDEX=rows is not None, FLAT=where_to.ndim == 1, HEADS=heads, K_DIM=k_dim, V_DIM=v_dim,
        BLOCK_H=triton.next_power_of_2(heads), BLOCK_K=triton.next_power_of_2(k_dim),
        BLOCK_V=triton.next_power_of_2(v_dim), num_warps=4,
    )  # fmt: skip


def _dense(part: Tensor) -> Tensor:
    """The kernels take any strides but the last dimension's."""
    return part if part.stride(-1) == 1 else part.contiguous()


def _blocks(group: int, q_len: int, widest: int, itemsize: int) -> tuple[int, int]:
    """Return query rows (of all the group's heads) and keys of a tile, small enough for a tile's registers."""
    most = 64 if widest * itemsize <= 256 else 32 if widest * itemsize <= 1024 else 16
    most_keys = 64
    if itemsize > 2:  # no tensor cores: products are unrolled, and a large tile takes seconds to compile
        most, most_keys = 16, 32
    block_m = max(16, triton.next_power_of_2(group), min(most, triton.next_power_of_2(q_len * group)))
    return block_m, max(16, min(most_keys, 16384 // (widest * itemsize)))


def _splits(busy: int, tiles: int, device: torch.device) -> int:
    """Return into how many parts to cut the keys, so that about two programs run on each multiprocessor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    wanted = min(2 * processors // busy, tiles, _MOST_SPLITS)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)
