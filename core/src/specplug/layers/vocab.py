"""A draft vocabulary: fewer rows than the target's, and what they mean there."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_vocabulary(d2t: Tensor | None, t2d: Tensor | None, rows: int, vocab: int) -> Tensor | None:
    """Return the target id of each draft id, int64 [rows] on the CPU; None where they are the same.

    `d2t` int64 [rows] stores offsets: the target id is the draft id plus its entry. `t2d` bool [vocab] marks the
    target ids that the draft has, in the order of its rows. Either suffices; with neither, `rows` has to be `vocab`.
    A contradiction, such as a `d2t` of plain ids, is a ValueError.
    """
    marked = None if t2d is None else t2d.to("cpu").bool().nonzero()[:, 0]
    if marked is not None and len(marked) != rows:
        raise ValueError(f"t2d marks {len(marked)} target ids for a head of {rows} rows")
    if d2t is None:
        if marked is None and rows != vocab:
            raise ValueError(f"the head has {rows} rows for a vocabulary of {vocab}, and neither d2t nor t2d")
        ids = torch.arange(rows) if marked is None else marked
    else:
        if len(d2t) != rows:
            raise ValueError(f"d2t has {len(d2t)} entries for a head of {rows} rows")
        ids = torch.arange(rows) + d2t.to("cpu", torch.int64)
        outside = ids[(ids < 0) | (ids >= vocab)]
        if len(outside):
            raise ValueError(f"d2t leads to id {int(outside[0])}, outside the vocabulary of {vocab}; it stores offsets")
        if len(torch.unique(ids)) != rows:
            raise ValueError("d2t leads two draft ids to one target id; it stores offsets")
        if marked is not None and not torch.equal(ids, marked):
            at = int((ids != marked).nonzero()[0])
            raise ValueError(f"d2t and t2d differ: draft id {at} is target id {int(ids[at])} or {int(marked[at])}")
    return None if rows == vocab and torch.equal(ids, torch.arange(rows)) else ids
