"""The rows of a step as tensors on the device: what attention, acceptance and the drafters' views all read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class StepRows:
    """R rows and T tokens of one forward, padded to a bucket. Views of static buffers, all int64 but where said.

    A row is its literal tokens (a prompt chunk, or the root alone) and then its drafts, node n of them at
    ``row_start + literal + n``. Its tokens lie at the token indices from `begin` on in this order, whatever
    the parents are: positions differ from token indices inside a tree. A row with drafts has one literal
    token, the root. Pad rows are empty and carry the scratch slot S; pad tokens belong to row `R_max`, one
    past the largest number of rows, which carries the scratch slot as well.
    """

    slots: Tensor  # [R]    executor, from the scheduler: identity of each row
    row_start: Tensor  # [R+1]  executor: row r owns the tokens row_start[r]:row_start[r+1]
    begin: Tensor  # [R]    executor: token index of the row's first token
    drafted: Tensor  # [R]    executor: drafts at its end
    token_row: Tensor  # [T]    executor: the row of each token
    tokens: Tensor  # [T]    prologue: token ids
    positions: Tensor  # [T]    prologue: position ids (root position + depth for a draft)
    kv_rows: Tensor  # [T]    prologue: pool row in which the token's K and V are kept; the trash row for pads
    ancestors: Tensor | None  # [T, W]  prologue: bit j of the words: a draft sees its row's token j; None: chains only
    tables: Tensor  # [S+1, P]  executor: page ids of each slot, int32; the trash page where none is held
    page_size: int
    trees: bool = False
    """executor: some row's drafts may branch, so that `ancestors` has to be read; chains are causal."""

    @property
    def rows(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def total(self) -> int:
        """T."""
        return len(self.tokens)


def words_for(nodes: int) -> int:
    """Return how many 64-bit words hold one bit for each token of a row with `nodes` drafts, the root included."""
    return -(-(nodes + 1) // 64)


def scratch_tables(slots: int, columns: int, trash_page: int, device: torch.device) -> Tensor:
    """Return page tables [slots + 1, columns] in which nobody holds anything, the scratch slot's last."""
    return torch.full((slots + 1, columns), trash_page, dtype=torch.int32, device=device)
