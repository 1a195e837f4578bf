"""Triton form of `specplug.runtime.attention.masks`. A row's work is shared by `_SHARES` programs."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specplug.runtime.device.rows import StepRows

_BLOCK = 256
_SHARES = 16


@triton.jit(do_not_specialize=["columns"])
def _list_pages(indices, kv_indptr, slots, tables, columns, BLOCK: tl.constexpr, SHARES: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(kv_indptr + row)
    count = tl.minimum(tl.load(kv_indptr + row + 1) - start, columns)
    slot = tl.load(slots + row)
    for at in range(tl.program_id(1) * BLOCK, count, BLOCK * SHARES):
        column = at + tl.arange(0, BLOCK)
        page = tl.load(tables + slot * columns + column, mask=column < count, other=0)
        tl.store(indices + start + column, page, mask=column < count)


@triton.jit
def _pack_masks(
    bits, mask_indptr, kv_len, row_start, begin, drafted, ancestors,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(row_start + row)
    count = tl.load(row_start + row + 1) - start
    base = tl.load(begin + row)
    literal = count - tl.load(drafted + row)
    keys = tl.load(kv_len + row).to(tl.int64)
    target = bits + tl.load(mask_indptr + row).to(tl.int64)
    every = count * keys
    for at in range(tl.program_id(1) * BLOCK, (every + 7) // 8, BLOCK * SHARES):
        byte = at + tl.arange(0, BLOCK).to(tl.int64)
        packed = tl.zeros([BLOCK], tl.int32)
        for bit in tl.static_range(8):
            flat = byte * 8 + bit
            inside = flat < every
            query = flat // tl.maximum(keys, 1)
            own = flat - query * keys - base  # the key, counted from the row's first token
            place = tl.minimum(tl.maximum(own, 0), WORDS * 64 - 1)
            draft = query >= literal
            word = tl.load(ancestors + (start + query) * WORDS + place // 64, mask=inside & draft & (own >= 0), other=0)
            told = ((word >> (place % 64)) & 1) != 0
            seen = inside & ((own < 0) | (draft & told & (own < WORDS * 64)) | ((query < literal) & (own <= query)))
            packed = packed | (seen.to(tl.int32) << bit)
        tl.store(target + byte, packed.to(tl.uint8), mask=byte * 8 < every)


def list_pages(indices: Tensor, kv_indptr: Tensor, rows: StepRows) -> None:
    """See `specplug.runtime.attention.masks.list_pages`."""
    _list_pages[(rows.rows, _SHARES)](
        indices, kv_indptr, rows.slots, rows.tables, rows.tables.shape[1], BLOCK=_BLOCK, SHARES=_SHARES, num_warps=4
    )


def pack_masks(bits: Tensor, mask_indptr: Tensor, kv_len: Tensor, rows: StepRows) -> None:
    """See `specplug.runtime.attention.masks.pack_masks`."""
    assert rows.ancestors is not None
    _pack_masks[(rows.rows, _SHARES)](
        bits, mask_indptr, kv_len, rows.row_start, rows.begin, rows.drafted, rows.ancestors,
        WORDS=rows.ancestors.shape[1], BLOCK=_BLOCK, SHARES=_SHARES, num_warps=4,
    )  # fmt: skip
