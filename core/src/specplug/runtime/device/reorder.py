"""Kept tokens first: the order in which a drafter sees the tokens of rows whose drafts branched."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug.runtime.device.rows import StepRows


def kept_first(
    rows: StepRows,
    literals: Tensor,
    accepted: Tensor,
    path: Tensor,
    taps: tuple[Tensor, ...],
    spare: tuple[Tensor, ...],
) -> None:
    """Reorder `rows.tokens`, `positions` and `taps` in place: in each row the accepted drafts come first, in order.

    `literals`, `accepted` [R] and `path` [R, D] are the rows'; a chain stays as it is. `spare`: buffers for
    the tokens, the positions and, if there are taps, one of these, whose contents do not matter.
    """
    if rows.tokens.is_cuda:
        from specplug.runtime.device.reorder_triton import kept_first as launch

        launch(rows, literals, accepted, path, taps, spare)
        return
    row = rows.token_row.clamp_max(rows.rows - 1)
    pad = rows.token_row >= rows.rows
    every = torch.arange(rows.total, device=row.device)
    node = every - rows.row_start[row] - literals[row]
    draft = (node >= 0) & ~pad
    counted = (torch.arange(path.shape[1], device=row.device) < accepted[row][:, None]) & draft[:, None]
    hit = (path[row] == node[:, None]) & counted
    # Drafts off the path go behind it, in their order: as many places as path nodes lie behind them.
    behind = ((path[row] > node[:, None]) & counted).sum(1)
    place = torch.where(hit.any(1), hit.int().argmax(1), node + behind)
    to = torch.where(draft, rows.row_start[row] + literals[row] + place, every)
    for part in (rows.tokens, rows.positions, *taps):
        part.copy_(torch.empty_like(part).index_copy_(0, to, part))
