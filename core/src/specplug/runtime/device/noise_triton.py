"""Philox-4x32-10 noise on CUDA, drawn where it is used.

The key is the request's seed, 64 bits. The counter's four words are: which block of the vocabulary, the
token's index in the sequence, the index among the request's choices, and ``stream + 4 * rank``. Every word
has one meaning, so no two purposes, positions, choices or siblings ever share a number. A generator call
gives four numbers; they belong to ids that are `LANES` apart, so that loads and stores stay contiguous, and
which id gets which number does not depend on the size of the vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specplug.noise import Stream

LANES = 256
_TILE = 4 * LANES  # ids that one generator call per lane covers
_STREAMS: dict[Stream, int] = {"target": 0, "draft": 1, "coin": 2, "residual": 3}
_PROGRAMS = 256  # about what fills a GPU: few rows are cut into parts

# Not specialised: small arrays are views of one upload and lie wherever they come to lie, and counts change from
# step to step. Otherwise each new combination would be compiled while serving.
_LOOSE = ["seed", "choice", "index", "rows", "temperature", "wanted", "rank", "stream", "size", "tiles"]


@triton.jit
def _bits(seed, choice, index, tag, tile, LANES: tl.constexpr):
    """31 random bits, int32 [LANES] four times: for ids ``tile + j * LANES + lane``."""
    block = tile // 4 + tl.arange(0, LANES)
    zero = block * 0
    one, two, three, four = tl.philox(
        seed, block, zero + index.to(tl.int32), zero + choice.to(tl.int32), zero + tag.to(tl.int32)
    )
    return (one >> 1).to(tl.int32), (two >> 1).to(tl.int32), (three >> 1).to(tl.int32), (four >> 1).to(tl.int32)


@triton.jit
def _gumbel(bits):
    """Minus the logarithm of an exponential variable, precise where that is small: there the winners are."""
    u = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2**-31
    u = tl.minimum(u, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    exponential = tl.where(u < 0.015625, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=_LOOSE)
def _gumbel_rows(seed, choice, index, wanted, out, stream, vocab, ALL: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * (4 * LANES)
    key = tl.load(seed + row)
    tag = key * 0 + stream
    one, two, three, four = _bits(key, tl.load(choice + row), tl.load(index + row), tag, tile, LANES)
    keep = 1.0
    if not ALL:
        keep = tl.where(tl.load(wanted + row) != 0, 1.0, 0.0)
    lane = tile + tl.arange(0, LANES)
    place = out + row * vocab
    tl.store(place + lane, _gumbel(one) * keep, mask=lane < vocab)
    tl.store(place + lane + LANES, _gumbel(two) * keep, mask=lane + LANES < vocab)
    tl.store(place + lane + 2 * LANES, _gumbel(three) * keep, mask=lane + 2 * LANES < vocab)
    tl.store(place + lane + 3 * LANES, _gumbel(four) * keep, mask=lane + 3 * LANES < vocab)


@triton.jit(do_not_specialize=_LOOSE)
def _uniform_rows(seed, choice, index, rank, out, stream, size, RANKED: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * (4 * LANES)
    key = tl.load(seed + row)
    tag = key * 0 + stream
    if RANKED:
        tag = tag + 4 * tl.load(rank + row)
    one, two, three, four = _bits(key, tl.load(choice + row), tl.load(index + row), tag, tile, LANES)
    lane = tile + tl.arange(0, LANES)
    place = out + row * size
    scale = 4.656612873077393e-10  # 2**-31
    tl.store(place + lane, (one.to(tl.float64) + 0.5) * scale, mask=lane < size)
    tl.store(place + lane + LANES, (two.to(tl.float64) + 0.5) * scale, mask=lane + LANES < size)
    tl.store(place + lane + 2 * LANES, (three.to(tl.float64) + 0.5) * scale, mask=lane + 2 * LANES < size)
    tl.store(place + lane + 3 * LANES, (four.to(tl.float64) + 0.5) * scale, mask=lane + 3 * LANES < size)


@triton.jit
def _better(best, best_id, logits, ids, vocab, bits, heat):
    """Per lane the larger of what it has and what it sees now; ids ascend, so an equal one never replaces."""
    value = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")) / heat + _gumbel(bits)
    wins = value > best
    return tl.where(wins, value, best), tl.where(wins, ids, best_id)


@triton.jit(do_not_specialize=_LOOSE)
def _gumbel_argmax(
    logits, rows, seed, choice, index, temperature, best_value, best_index, stream, vocab, stride, tiles,
    GATHER: tl.constexpr, HEATED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = row
    if GATHER:
        source = tl.load(rows + row)
    heat = 1.0
    if HEATED:
        heat = tl.load(temperature + row)
    place = logits + source * stride
    key = tl.load(seed + row)
    tag = key * 0 + stream
    its_choice = tl.load(choice + row)
    its_index = tl.load(index + row)
    first = part * tiles * (4 * LANES)
    lane = tl.arange(0, LANES)
    best = tl.full((LANES,), float("-inf"), tl.float32)
    best_id = first + lane
    for nth in range(tiles):
        tile = first + nth * (4 * LANES)
        one, two, three, four = _bits(key, its_choice, its_index, tag, tile, LANES)
        best, best_id = _better(best, best_id, place, tile + lane, vocab, one, heat)
        best, best_id = _better(best, best_id, place, tile + LANES + lane, vocab, two, heat)
        best, best_id = _better(best, best_id, place, tile + 2 * LANES + lane, vocab, three, heat)
        best, best_id = _better(best, best_id, place, tile + 3 * LANES + lane, vocab, four, heat)
    most = tl.max(best, 0)
    winner = tl.min(tl.where(best == most, best_id, 2147483647), 0)
    at = row * tl.num_programs(1) + part
    tl.store(best_value + at, most)
    tl.store(best_index + at, winner.to(tl.int64))


def gumbel_rows(
    seed: Tensor, choice: Tensor, index: Tensor, stream: Stream, vocab: int, wanted: Tensor | None = None
) -> Tensor:
    """See `specplug.runtime.device.noise.gumbel_rows`."""
    made = torch.empty(len(seed), vocab, dtype=torch.float32, device=seed.device)
    if made.numel():
        _gumbel_rows[(len(seed), triton.cdiv(vocab, _TILE))](
            seed, choice, index, seed if wanted is None else wanted, made,
            _STREAMS[stream], vocab, ALL=wanted is None, LANES=LANES,
        )  # fmt: skip
    return made


def uniform_rows(
    seed: Tensor, choice: Tensor, index: Tensor, stream: Stream, size: int, rank: Tensor | None = None
) -> Tensor:
    """See `specplug.runtime.device.noise.uniform_rows`."""
    made = torch.empty(len(seed), size, dtype=torch.float64, device=seed.device)
    if made.numel():
        _uniform_rows[(len(seed), triton.cdiv(size, _TILE))](
            seed, choice, index, seed if rank is None else rank, made,
            _STREAMS[stream], size, RANKED=rank is not None, LANES=LANES,
        )  # fmt: skip
    return made


def gumbel_argmax(
    logits: Tensor,
    seed: Tensor,
    choice: Tensor,
    index: Tensor,
    stream: Stream,
    rows: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """See `specplug.runtime.device.noise.gumbel_argmax`. `logits` is contiguous along the vocabulary."""
    count, vocab = len(seed), logits.shape[1]
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=seed.device)
    tiles = triton.cdiv(vocab, _TILE)
    each = triton.cdiv(tiles, max(1, min(tiles, _PROGRAMS // count)))
    parts = triton.cdiv(tiles, each)
    value = torch.empty(count, parts, dtype=torch.float32, device=seed.device)
    found = torch.empty(count, parts, dtype=torch.int64, device=seed.device)
    _gumbel_argmax[(count, parts)](
        logits, seed if rows is None else rows, seed, choice, index, logits if temperature is None else temperature,
        value, found, _STREAMS[stream], vocab, logits.stride(0), each,
        GATHER=rows is not None, HEATED=temperature is not None, LANES=LANES,
    )  # fmt: skip
    # `max` names the first of equal parts, which holds the lower ids.
    return found[:, 0] if parts == 1 else found.gather(1, value.max(1, keepdim=True).indices)[:, 0]
