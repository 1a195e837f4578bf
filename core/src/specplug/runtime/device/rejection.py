"""The `rejection` rule for many rows at once: `specplug.accept` with rows where that has one.

One pass over the nodes does what the walk does: parents stand before children and siblings in the order in
which they are tried, so a row tries node n if it stands at n's parent when n's turn comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specplug.runtime.device.noise import gumbel_argmax, uniform_rows
from specplug.runtime.device.walk import Drafts, Walked, sound


@dataclass(frozen=True, slots=True)
class RejectionRows:
    """The sampled rows of a step, m of them. int64 [m] each."""

    slots: Tensor
    drafted: Tensor
    first: Tensor
    """Row of the probabilities that belongs to the root; node n's is ``first + 1 + n``."""
    root_index: Tensor
    """Token index of the root."""
    seed: Tensor
    choice: Tensor


def reject(
    rows: RejectionRows,
    probs: Tensor,
    blocked: Tensor,
    drafts: Drafts,
    q: Tensor | None,
    dense: Tensor | None,
    nodes: int,
) -> Walked:
    """Decide every row; `Walked` of m rows.

    `probs` float32 [n, V]: the target's distribution at each node; `blocked` bool [n]: nothing can be
    chosen there; `q` [S+1, N, V] and `dense` bool [S+1] as in `Proposal`: what the drafts of dense slots were
    drawn from, the others are certain. `nodes`: most drafts of any row, known on the host.
    """
    at, zero = rows.first, torch.zeros_like(rows.first)
    node, depth, rank = zero - 1, zero, zero
    stopped = blocked[at]
    count = sound(rows.drafted, rows.slots, drafts)
    path = torch.full((len(at), drafts.depth), -1, dtype=torch.int64, device=at.device)
    levels = torch.arange(drafts.depth, device=at.device)
    p = probs[at]
    for child in range(nodes):
        token = drafts.tokens[rows.slots, child]
        tried = (child < count) & (drafts.parents[rows.slots, child] == node) & (depth < drafts.depth) & ~stopped
        token = torch.where(tried, token, 0)[:, None]
        expected = torch.zeros_like(p).scatter_(1, token, 1.0)
        if q is not None and dense is not None:
            expected = torch.where(dense[rows.slots, None], q[rows.slots, child], expected)
        coin = uniform_rows(rows.seed, rows.choice, rows.root_index + depth + 1, "coin", 1, rank)[:, 0]
        left = (p - expected).clamp_min_(0.0)
        mass = left.sum(1)
        wins = coin * expected.gather(1, token)[:, 0].double() < p.gather(1, token)[:, 0].double()
        # Without mass left p equals q up to rounding: a refusal has probability 0.
        taken = tried & (wins | (mass <= 0.0))
        refused = tried & ~taken
        path = torch.where(taken[:, None] & (levels == depth[:, None]), child, path)
        at = torch.where(taken, rows.first + 1 + child, at)
        p = torch.where(taken[:, None], probs[at], torch.where(refused[:, None], left / mass[:, None], p))
        node = torch.where(taken, child, node)
        depth = depth + taken
        rank = torch.where(taken, 0, rank + refused)
        stopped = torch.where(taken, blocked[at], stopped)
    index = rows.root_index + depth + 1
    logs = p.log()
    token = gumbel_argmax(logs, rows.seed, rows.choice, index, "target")
    if nodes:
        token = torch.where(rank > 0, gumbel_argmax(logs, rows.seed, rows.choice, index, "residual"), token)
    return Walked(depth, path, torch.where(stopped, -1, token))
