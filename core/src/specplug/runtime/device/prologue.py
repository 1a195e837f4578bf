"""The first thing on the device in a step: from rows and proposals to tokens, positions, KV rows and ancestors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specplug.proposal import Proposal
from specplug.runtime.device.rows import StepRows


@dataclass(slots=True)
class PrologueInputs:
    """What `prologue` reads beside the rows. Views of static buffers, int64. Set by the executor."""

    literal: Tensor  # [T]    the host's token ids; -1: the root of the row's slot, which only the device knows
    slots: Tensor  # [R_max+1]  as `StepRows.slots`, for all rows and the one that pad tokens belong to
    starts: Tensor  # [R_max+1]  first token of each
    begins: Tensor  # [R_max+1]  its token index
    literals: Tensor  # [R_max+1]  tokens before its drafts
    roots: Tensor  # [S+1]  newest token of each slot
    vocab: int
    depth: int
    """Longest path of a proposal."""
    trash_row: int


def prologue(rows: StepRows, inputs: PrologueInputs, proposal: Proposal | None) -> None:
    """Fill `rows.tokens`, `positions`, `kv_rows` and, where it has them, `ancestors`.

    A draft that is not valid is token 0 just behind the root: it costs its place and can be no child of
    anything. Parents that do not lie before their node are followed no further.
    """
    if rows.tokens.is_cuda:
        from specplug.runtime.device.prologue_triton import prologue as launch

        launch(rows, inputs, proposal)
        return
    row = rows.token_row
    slot, begin, literals = inputs.slots[row], inputs.begins[row], inputs.literals[row]
    pad = row == len(inputs.slots) - 1
    at = torch.arange(rows.total, device=row.device) - inputs.starts[row]
    node = at - literals
    index = begin + at
    tokens = torch.where(inputs.literal >= 0, inputs.literal, inputs.roots[slot])
    positions = index
    if proposal is not None:
        valid = (node >= 0) & (node < proposal.num_valid[slot])
        drafts = proposal.tokens[slot, node.clamp(0, proposal.tokens.shape[1] - 1)].clamp(0, inputs.vocab - 1)
        tokens = torch.where(node < 0, tokens, torch.where(valid, drafts, 0))
        here, depth = torch.where(valid, node, -1), torch.zeros_like(node)
        if rows.ancestors is not None:
            rows.ancestors.zero_()
            rows.ancestors[:, 0] = 1
        for _ in range(inputs.depth):
            inside = here >= 0
            depth += inside
            if rows.ancestors is not None:
                word = ((here + 1) // 64)[:, None]
                bit = torch.where(inside, torch.ones_like(here) << ((here + 1) % 64), 0)[:, None]
                rows.ancestors.scatter_(1, word, rows.ancestors.gather(1, word) | bit)
            parent = proposal.parents[slot, here.clamp_min(0)]
            here = torch.where(inside, torch.minimum(parent, here - 1), here).clamp_min(-1)
        positions = torch.where(node < 0, index, begin + literals - 1 + depth)
    page = (index // rows.page_size).clamp(0, rows.tables.shape[1] - 1)
    kv_rows = rows.tables[slot, page].long() * rows.page_size + index % rows.page_size
    rows.tokens.copy_(torch.where(pad, 0, tokens))
    rows.positions.copy_(torch.where(pad, 0, positions))
    rows.kv_rows.copy_(torch.where(pad, inputs.trash_row, kv_rows))
