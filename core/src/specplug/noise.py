"""Counter-based randomness: a draw is a function of what it is for, never of when it was made.

Every draw is keyed by (request seed, choice index, token index, stream, sibling rank), so it survives
preemption, does not depend on batch mates, and a drafter may draw with the very noise that the target
will use. The generator is Philox-4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011): the seed and the choice are its key, the rest is its counter.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Stream = Literal["target", "draft", "coin", "residual"]
"""target: tokens of the model, plain decoding too; draft: drafted tokens under `rejection`; coin: its
accept decisions; residual: its replacements. No two purposes share noise."""

_STREAMS: dict[Stream, int] = {"target": 0, "draft": 1, "coin": 2, "residual": 3}
_SMALLEST = 2.0**-53  # random() is a multiple of this; an exact 0 would give an infinite Gumbel value


def uniform(seed: int, choice: int, index: int, stream: Stream, size: int, rank: int = 0) -> np.ndarray:
    """Return `size` float64 numbers in (0, 1) for the token at `index` of the sequence (prompt counted)."""
    key = np.array([seed, choice], dtype=np.uint64)
    # The first counter word is the one the generator itself advances.
    counter = np.array([0, index, _STREAMS[stream], rank], dtype=np.uint64)
    numbers = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(size)
    return np.maximum(numbers, _SMALLEST)


def gumbel(seed: int, choice: int, index: int, stream: Stream, vocab: int) -> Tensor:
    """Return float32 [vocab] standard Gumbel noise: ``argmax(log p + g)`` is a draw from p."""
    numbers = uniform(seed, choice, index, stream, vocab)
    return torch.from_numpy(-np.log(-np.log(numbers))).float()
