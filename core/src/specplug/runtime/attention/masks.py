"""What a planned kernel reads about a step's rows, made on the device: page lists, and tree masks as packed bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specplug.runtime.attention.paged import seen_keys, step_queries
from specplug.runtime.device.rows import StepRows


def list_pages(indices: Tensor, kv_indptr: Tensor, rows: StepRows) -> None:
    """Fill `indices` int32 [N] with each row's pages, those of row r at ``kv_indptr[r]:kv_indptr[r+1]``.

    `kv_indptr` int32 [R+1]. What lies behind the last is left alone.
    """
    if indices.is_cuda:
        from specplug.runtime.attention.masks_triton import list_pages as launch

        launch(indices, kv_indptr, rows)
        return
    bounds = kv_indptr.tolist()
    for row, slot in enumerate(rows.slots.tolist()):
        indices[bounds[row] : bounds[row + 1]] = rows.tables[slot, : bounds[row + 1] - bounds[row]]


def pack_masks(bits: Tensor, mask_indptr: Tensor, kv_len: Tensor, rows: StepRows) -> None:
    """Fill `bits` uint8 [N] with each row's tree mask, that of row r from byte ``mask_indptr[r]`` on.

    `mask_indptr` int32 [R+1] and `kv_len` int32 [R], or longer: the keys of each row, from token index 0 on; 0: the
    row has no mask. Bit ``query * kv_len + key`` of a row, counted from the lowest of its first byte, says whether it
    is seen.
    """
    if bits.is_cuda:
        from specplug.runtime.attention.masks_triton import pack_masks as launch

        launch(bits, mask_indptr, kv_len, rows)
        return
    queries = step_queries(rows, trees=True)
    starts, bounds = rows.row_start.tolist(), mask_indptr.tolist()
    for row, keys in enumerate(kv_len.tolist()[: rows.rows]):
        count = starts[row + 1] - starts[row]
        if not keys or not count:
            continue
        seen = seen_keys(queries, row, starts[row], starts[row + 1], None)
        mask = torch.zeros(count, keys, dtype=torch.bool)
        mask[:, : seen.shape[1]] = seen[:, :keys]
        packed = np.packbits(mask.flatten().numpy(), bitorder="little")
        bits[bounds[row] : bounds[row] + len(packed)] = torch.from_numpy(packed)
