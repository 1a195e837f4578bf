"""Bring the KV of accepted paths into sequence order, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug.runtime.device.rows import StepRows
from specplug.runtime.kv import KVPool


def move(pool: KVPool, rows: StepRows, accepted: Tensor, path: Tensor) -> None:
    """Move each accepted draft's K and V to where a chain would have put it, in one launch per group of layers.

    `accepted` int64 [R], `path` int64 [R, D]: nodes from the root downwards, -1 padded. The j-th of them goes
    from the pool row of token index ``begin + 1 + path[j]`` to that of ``begin + 1 + j``. What lies there is a
    rejected draft, or one moved already: a path's j-th node is at least j. Chains move nothing.
    """
    for k, v in pool.groups.values():
        if k.is_cuda:
            from specplug.runtime.device.compact_triton import move as launch

            launch(k, v, rows, accepted, path)
            continue
        j = torch.arange(path.shape[1], device=path.device)
        moves = (j < accepted[:, None]) & (path > j)
        trash = rows.tables[-1, 0].long() * rows.page_size  # from there to there where nothing moves
        source = torch.where(moves, _pool_rows(rows, rows.begin[:, None] + 1 + path), trash).flatten()
        target = torch.where(moves, _pool_rows(rows, rows.begin[:, None] + 1 + j), trash).flatten()
        for part in (k, v):
            part.index_copy_(1, target, part.index_select(1, source))


def _pool_rows(rows: StepRows, index: Tensor) -> Tensor:
    page = (index // rows.page_size).clamp(0, rows.tables.shape[1] - 1)
    return rows.tables[rows.slots[:, None], page].long() * rows.page_size + index % rows.page_size
