"""Triton form of `specplug.runtime.device.compact.move`: one program per row, layer and block of a token's values."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specplug.runtime.device.rows import StepRows

_MOST = 1024
# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = ["slots", "begin", "accepted", "path", "tables", "columns", "page_size", "pool_rows"]


@triton.jit(do_not_specialize=_LOOSE)
def _move(
    k, v, slots, begin, accepted, path, tables, columns, page_size, pool_rows, k_width, v_width,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    count = tl.load(accepted + row)
    root = tl.load(begin + row)
    table = tables + slot * columns
    keys = k + layer * pool_rows * k_width
    values = v + layer * pool_rows * v_width
    # One after the other: a later draft's place may be where an earlier one came from. Each lane moves the
    # same element of all of them, so no lane waits for another.
    for j in range(DEPTH):
        node = tl.load(path + row * DEPTH + j)
        moves = (j < count) & (node > j)
        old = root + 1 + node
        new = root + 1 + j
        old_page = tl.load(table + old // page_size, mask=moves, other=0).to(tl.int64)
        new_page = tl.load(table + new // page_size, mask=moves, other=0).to(tl.int64)
        source = old_page * page_size + old % page_size
        target = new_page * page_size + new % page_size
        some_k = moves & (lane < k_width)
        some_v = moves & (lane < v_width)
        key = tl.load(keys + source * k_width + lane, mask=some_k)
        value = tl.load(values + source * v_width + lane, mask=some_v)
        tl.store(keys + target * k_width + lane, key, mask=some_k)
        tl.store(values + target * v_width + lane, value, mask=some_v)


def move(k: Tensor, v: Tensor, rows: StepRows, accepted: Tensor, path: Tensor) -> None:
    """Move within one group of layers; see `specplug.runtime.device.compact.move`."""
    layers, pool_rows = k.shape[:2]
    k_width, v_width = k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]
    block = min(_MOST, triton.next_power_of_2(max(k_width, v_width)))
    if not len(accepted):
        return
    _move[(len(accepted), layers, triton.cdiv(max(k_width, v_width), block))](
        k, v, rows.slots, rows.begin, accepted, path, rows.tables,
        rows.tables.shape[1], rows.page_size, pool_rows, k_width, v_width, DEPTH=path.shape[1], BLOCK=block,
    )  # fmt: skip
