"""Triton form of `specplug.grammar.masks.forbid`: one pass over the values of the rows that have a grammar."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = ["values", "at", "masks", "stride"]


@triton.jit(do_not_specialize=_LOOSE)
def _forbid(values, at, masks, vocab, stride, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    word = tl.load(masks + row * words + ids // 64, mask=inside, other=-1)
    clear = ((word >> (ids % 64).to(tl.int64)) & 1) == 0
    place = values + tl.load(at + row) * stride + ids
    tl.store(place, float("-inf"), mask=inside & clear)


def forbid(values: Tensor, at: Tensor, masks: Tensor) -> None:
    """See `specplug.grammar.masks.forbid`."""
    vocab = values.shape[1]
    _forbid[(len(at), triton.cdiv(vocab, _BLOCK))](
        values, at, masks, vocab, values.stride(0), masks.stride(0), BLOCK=_BLOCK
    )
