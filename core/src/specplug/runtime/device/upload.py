"""Many small arrays of one step in one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy int64 arrays to `device` without waiting for it, in one transfer; returns one tensor for each.

    The pinned memory comes from torch's cache, which gives a block out again only when the copies from it
    are over.
    """
    sizes = [array.size for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    if sum(sizes):
        np.concatenate([array.ravel() for array in arrays], out=staged.numpy())
    parts = torch.split(staged.to(device, non_blocking=True), sizes)
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
