"""Triton form of `Penalties.penalise`: one pass over the values, without gathering counts."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
# Not specialised on where small arrays happen to lie: see `specplug.runtime.device.noise_triton`.
_LOOSE = ["values", "slots", "above"]


@triton.jit(do_not_specialize=_LOOSE)
def _penalise(
    values, slots, above, counts, seen, sampling, vocab, stride, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    slot = tl.load(slots + row)
    count = tl.load(counts + slot * vocab + ids, mask=inside, other=0)
    known = tl.load(seen + slot * vocab + ids, mask=inside, other=0).to(tl.int32)
    for at in range(DEPTH):
        token = tl.load(above + row * DEPTH + at)
        here = (ids == token).to(tl.int32)  # -1 is no id
        count += here
        known = known | here
    repetition = tl.load(sampling + slot * 3)
    frequency = tl.load(sampling + slot * 3 + 1)
    presence = tl.load(sampling + slot * 3 + 2)
    place = values + row * stride + ids
    value = tl.load(place, mask=inside, other=0.0)
    repeated = tl.where(value > 0, value / repetition, value * repetition)
    value = tl.where(known != 0, repeated, value)
    value -= frequency * count.to(tl.float32)
    value -= tl.where(count > 0, presence, 0.0)
    tl.store(place, value, mask=inside)


def penalise(values: Tensor, slots: Tensor, above: Tensor, counts: Tensor, seen: Tensor, sampling: Tensor) -> None:
    """See `specplug.runtime.device.penalties.Penalties.penalise`."""
    rows, vocab = values.shape
    _penalise[(rows, triton.cdiv(vocab, _BLOCK))](
        values, slots, above, counts, seen, sampling, vocab, values.stride(0), DEPTH=above.shape[1], BLOCK=_BLOCK
    )
