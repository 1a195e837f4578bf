"""Counter-based noise for many rows at once: the device's form of `specplug.noise`.

On a CPU the numbers are those of `specplug.noise`, so that the device path run there gives the CPU
engine's text. On CUDA they come from another generator (`specplug.runtime.device.noise_triton`), keyed by
the same things; an answer's seed means another answer there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specplug import noise
from specplug.noise import Stream


def gumbel_rows(
    seed: Tensor, choice: Tensor, index: Tensor, stream: Stream, vocab: int, wanted: Tensor | None = None
) -> Tensor:
    """Return standard Gumbel noise, float32 [n, vocab], for the tokens at `index` of n sequences.

    `seed`, `choice`, `index`: int64 [n]; `wanted`, bool [n]: the other rows are zeros and cost nothing.
    """
    if seed.is_cuda:
        from specplug.runtime.device.noise_triton import gumbel_rows as launch

        return launch(seed, choice, index, stream, vocab, wanted)
    made = torch.zeros(len(seed), vocab)
    keys = zip(seed.tolist(), choice.tolist(), index.tolist(), strict=True)
    for row, (its_seed, its_choice, its_index) in enumerate(keys):
        if wanted is None or wanted[row]:
            made[row] = noise.gumbel(its_seed, its_choice, its_index, stream, vocab)
    return made


def uniform_rows(
    seed: Tensor, choice: Tensor, index: Tensor, stream: Stream, size: int, rank: Tensor | None = None
) -> Tensor:
    """Return numbers in (0, 1), float64 [n, size]. Arguments as in `gumbel_rows`; `rank` int64 [n], 0 if None."""
    if seed.is_cuda:
        from specplug.runtime.device.noise_triton import uniform_rows as launch

        return launch(seed, choice, index, stream, size, rank)
    ranks = torch.zeros_like(seed) if rank is None else rank
    keys = zip(seed.tolist(), choice.tolist(), index.tolist(), ranks.tolist(), strict=True)
    rows = [noise.uniform(s, c, at, stream, size, r) for s, c, at, r in keys]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, size, dtype=torch.float64)


def gumbel_argmax(
    logits: Tensor,
    seed: Tensor,
    choice: Tensor,
    index: Tensor,
    stream: Stream,
    *,
    rows: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """Return a draw from the softmax of each row of `logits`, int64 [n]: its largest entry after noise is added.

    `logits` is float32 [n, V], or [M, V] with `rows` int64 [n] saying which of them; `temperature`
    float32 [n], above 0, divides them first. Of equal entries the lowest id wins; -inf never does. On CUDA
    one pass, without a tensor of noise.
    """
    if logits.is_cuda:
        from specplug.runtime.device.noise_triton import gumbel_argmax as launch

        return launch(logits, seed, choice, index, stream, rows, temperature)
    values = logits if rows is None else logits[rows]
    if temperature is not None:
        values = values / temperature[:, None]
    return (values + gumbel_rows(seed, choice, index, stream, logits.shape[1])).argmax(1)
