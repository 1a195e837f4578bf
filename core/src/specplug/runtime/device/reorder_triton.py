"""Triton form of `specplug.runtime.device.reorder`: one program per token, and one per token and block of a tap."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specplug.runtime.device.rows import StepRows

_BLOCK = 1024
# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = [
    "tokens", "positions", "to_tokens", "to_positions",
    "token_row", "row_start", "literals", "accepted", "path", "live",
]  # fmt: skip


@triton.jit
def _place(t, token_row, row_start, literals, accepted, path, live, D: tl.constexpr, D2: tl.constexpr):
    """Return where token `t` goes."""
    row = tl.load(token_row + t)
    inside = row < live
    first = tl.load(row_start + row, mask=inside, other=0) + tl.load(literals + row, mask=inside, other=0)
    node = t - first
    count = tl.load(accepted + row, mask=inside, other=0)
    along = tl.arange(0, D2)
    counted = along < count
    nodes = tl.load(path + row * D + along, mask=counted & (along < D) & inside, other=-1)
    hit = counted & (nodes == node)
    on_path = tl.sum(hit.to(tl.int64), 0) > 0
    at = tl.sum(tl.where(hit, along, 0).to(tl.int64), 0)
    behind = tl.sum((counted & (nodes > node)).to(tl.int64), 0)
    moved = first + tl.where(on_path, at, node + behind)
    return tl.where(inside & (node >= 0), moved, t)


@triton.jit(do_not_specialize=_LOOSE)
def _numbers(
    tokens, positions, to_tokens, to_positions, token_row, row_start, literals, accepted, path, live,
    D: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    to = _place(t, token_row, row_start, literals, accepted, path, live, D, D2)
    tl.store(to_tokens + to, tl.load(tokens + t))
    tl.store(to_positions + to, tl.load(positions + t))


@triton.jit(do_not_specialize=_LOOSE[4:])
def _states(
    tap, to_tap, token_row, row_start, literals, accepted, path, live, size,
    D: tl.constexpr, D2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    to = _place(t, token_row, row_start, literals, accepted, path, live, D, D2)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(tap + t * size + lane, mask=lane < size, other=0.0)
    tl.store(to_tap + to * size + lane, state, mask=lane < size)


def kept_first(
    rows: StepRows,
    literals: Tensor,
    accepted: Tensor,
    path: Tensor,
    taps: tuple[Tensor, ...],
    spare: tuple[Tensor, ...],
) -> None:
    """See `specplug.runtime.device.reorder.kept_first`. All tensors are contiguous."""
    where = (rows.token_row, rows.row_start, literals, accepted, path, rows.rows)
    shape = {"D": path.shape[1], "D2": triton.next_power_of_2(path.shape[1])}
    tokens, positions = (part[: rows.total] for part in spare[:2])
    _numbers[(rows.total,)](rows.tokens, rows.positions, tokens, positions, *where, **shape, num_warps=1)
    rows.tokens.copy_(tokens)
    rows.positions.copy_(positions)
    for tap in taps:
        moved, size = spare[2][: rows.total], tap.shape[1]
        grid = (rows.total, triton.cdiv(size, _BLOCK))
        _states[grid](tap, moved, *where, size, **shape, BLOCK=_BLOCK, num_warps=4)
        tap.copy_(moved)
