"""Triton form of `specplug.runtime.device.sampling.filtered`: one program per row, no sorting.

Where top_k and top_p cut is found by searching the value of the last token that stays, four bits of it per
pass over the row: the largest value such that k tokens, or the wanted share of the mass, are at or above it.
Float32 values are compared through integers of the same order. Of the tokens that equal it as many stay
as are needed, lowest ids first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.runtime.device.sampling import Filters

_BLOCK = 1024  # ids per step of a pass; 16 pivots each are held in registers
# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = ["logits", "rows", "temperature", "top_k", "top_p", "min_p"]


@triton.jit
def _scaled(logits, ids, vocab, heat):
    values = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")) / heat
    return tl.where(values == 0.0, 0.0, values)  # one zero only, as comparisons of floats have it


@triton.jit
def _order(values):
    """int32 that compare as the floats do."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _mass(values, most, edge, weight):
    """What each value weighs among those that top_k lets stay, the largest of them 1."""
    keys = _order(values)
    mass = tl.exp(values - most)
    return tl.where(keys > edge, mass, tl.where(keys == edge, mass * weight, 0.0))


@triton.jit
def _pivots(found, shift):
    """16 int32 candidates for the next four bits of `found`, an int64 that counts from the least int32."""
    return (found + (tl.arange(0, 16).to(tl.int64) << shift) - 2147483648).to(tl.int32)


@triton.jit(do_not_specialize=_LOOSE)
def _filtered(
    logits, rows, temperature, top_k, top_p, min_p, out, vocab, stride,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = row
    if GATHER:
        source = tl.load(rows + row)
    place = logits + source * stride
    heat = tl.load(temperature + row)
    lane = tl.arange(0, BLOCK)

    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        largest = tl.maximum(largest, _scaled(place, first + lane, vocab, heat))
    most = tl.max(largest, 0)

    # What stays: values above `edge`, and of those equal to it the `ties` with the lowest ids.
    edge = tl.full((), -2147483648, tl.int32)
    ties = tl.full((), 2147483647, tl.int32)
    weight = tl.full((), 1.0, tl.float32)  # share of the values equal to `edge` that stays
    count = tl.load(top_k + row)
    if (count > 0) & (count < vocab):
        found = count * 0
        for step in range(8):
            shift = found * 0 + (28 - 4 * step)
            pivots = _pivots(found, shift)
            above = tl.zeros((BLOCK, 16), tl.int32)
            for first in range(0, vocab, BLOCK):
                ids = first + lane
                keys = _order(_scaled(place, ids, vocab, heat))
                hit = (keys[:, None] >= pivots[None, :]) & (ids < vocab)[:, None]
                above += hit.to(tl.int32)
            enough = (tl.sum(above, 0).to(tl.int64) >= count).to(tl.int64)
            found += (tl.maximum(tl.sum(enough, 0), 1) - 1) << shift
        edge = (found - 2147483648).to(tl.int32)
        over = tl.zeros((BLOCK,), tl.int32)
        equal = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, vocab, BLOCK):
            ids = first + lane
            keys = _order(_scaled(place, ids, vocab, heat))
            over += ((keys > edge) & (ids < vocab)).to(tl.int32)
            equal += ((keys == edge) & (ids < vocab)).to(tl.int32)
        ties = count.to(tl.int32) - tl.sum(over, 0)
        weight = ties.to(tl.float32) / tl.sum(equal, 0).to(tl.float32)
    share = tl.load(top_p + row)
    if share < 1.0:
        # Tokens this unlikely have less than 1 - top_p of the mass together, so that none of them can stay. What is
        # left is few where a model is sure of itself; it is put together in `out`, and searched there.
        bound = most + tl.log(tl.maximum(1.0 - share, 1.0e-9) / vocab) - 0.01
        total = tl.zeros((BLOCK,), tl.float32)
        near = tl.full((), 0, tl.int32)
        nearest = out + row * vocab
        for first in range(0, vocab, BLOCK):
            ids = first + lane
            values = _scaled(place, ids, vocab, heat)
            total += _mass(values, most, edge, weight)
            inside = ((values >= bound) & (ids < vocab)).to(tl.int32)
            tl.store(nearest + near + tl.cumsum(inside, 0) - 1, values, mask=inside > 0)
            near += tl.sum(inside, 0)
        tl.debug_barrier()
        wanted = tl.sum(total, 0) * share
        found = source * 0
        for step in range(8):
            shift = found * 0 + (28 - 4 * step)
            pivots = _pivots(found, shift)
            above_mass = tl.zeros((BLOCK, 16), tl.float32)
            for first in range(0, near, BLOCK):
                values = tl.load(nearest + first + lane, mask=first + lane < near, other=float("-inf"))
                mass = _mass(values, most, edge, weight)
                above_mass += tl.where(_order(values)[:, None] >= pivots[None, :], mass[:, None], 0.0)
            enough = (tl.sum(above_mass, 0) >= wanted).to(tl.int64)
            found += (tl.maximum(tl.sum(enough, 0), 1) - 1) << shift
        last = (found - 2147483648).to(tl.int32)
        if last >= edge:
            over_mass = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, near, BLOCK):
                values = tl.load(nearest + first + lane, mask=first + lane < near, other=float("-inf"))
                over_mass += tl.where(_order(values) > last, tl.exp(values - most), 0.0)
            bits = tl.where(last < 0, last ^ 0x7FFFFFFF, last)
            each = tl.exp(bits.to(tl.float32, bitcast=True) - most)
            missing = tl.maximum(wanted - tl.sum(over_mass, 0), 0.0)
            needed = tl.maximum(tl.ceil(tl.minimum(missing / each, 1.0e9)), 1.0).to(tl.int32)
            ties = tl.where(last == edge, tl.minimum(ties, needed), needed)
            edge = last
        tl.debug_barrier()

    floor = tl.full((), float("-inf"), tl.float32)
    least = tl.load(min_p + row)
    floor = tl.where(least > 0.0, most + tl.log(tl.maximum(least, 1.0e-38)), floor)
    passed = tl.full((), 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + lane
        values = _scaled(place, ids, vocab, heat)
        keys = _order(values)
        equal = ((keys == edge) & (ids < vocab)).to(tl.int32)
        nth = passed + tl.cumsum(equal, 0)
        keep = ((keys > edge) | ((equal > 0) & (nth <= ties))) & (values >= floor)
        tl.store(out + row * vocab + ids, tl.where(keep, values, float("-inf")), mask=ids < vocab)
        passed += tl.sum(equal, 0)


def filtered(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    use: Filters,
    rows: Tensor | None = None,
) -> Tensor:
    """See `specplug.runtime.device.sampling.filtered`. `logits` is contiguous along the vocabulary.

    `use` is not needed: each row skips the passes of what it does not use.
    """
    count, vocab = len(temperature), logits.shape[1]
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    if count:
        _filtered[(count,)](
            logits, temperature if rows is None else rows, temperature, top_k, top_p, min_p, out,
            vocab, logits.stride(0),
            GATHER=rows is not None, BLOCK=_BLOCK,
            num_warps=8,
        )  # fmt: skip
    return out
