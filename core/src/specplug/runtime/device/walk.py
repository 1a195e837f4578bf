"""The walk from each row's root down the drafts that the target chose, and what it needs to know of a tree.

Well-formed drafts are told apart here: only the leading ones whose token is in the vocabulary and whose
parent stands before them exist, and of those only what a path of `depth` nodes can reach.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Drafts(NamedTuple):
    """The proposals of all slots, as acceptance reads them."""

    tokens: Tensor
    """[S+1, N] int64."""
    parents: Tensor
    """[S+1, N] int64."""
    num_valid: Tensor
    """[S+1] int64."""
    vocab: int
    depth: int
    """D: longest path that is walked."""


class Walked(NamedTuple):
    """What became of R rows."""

    accepted: Tensor
    """[R] int64: drafts accepted."""
    path: Tensor
    """[R, D] int64: their nodes from the root downwards, -1 padded."""
    token: Tensor
    """[R] int64: the token that follows; -1 if none could be chosen, or the row is not decided."""


def walk(
    choice: Tensor,
    start: Tensor,
    drafted: Tensor,
    slots: Tensor,
    drafts: Drafts,
    lead: Tensor | None = None,
    out: Walked | None = None,
) -> Walked:
    """Walk down every row; the outcome is written to `out`, where that is given.

    `choice` int64 [M]: the token that the target chose at each logits row, -1 for none; `start` int64 [R]:
    the logits row of each row's root, node n's being ``start + 1 + n``, -1 = not decided; `drafted` int64
    [R]: drafts that were verified; `slots` int64 [R]. A draft is accepted if it is the target's choice at
    its parent; with `lead` int64 [R] instead the first child is, whatever it is, for so many nodes.
    """
    if choice.is_cuda:
        from specplug.runtime.device.walk_triton import walk as launch

        return launch(choice, start, drafted, slots, drafts, lead, out)
    count = sound(drafted, slots, drafts)
    parents, tokens = drafts.parents[slots], drafts.tokens[slots]
    nodes = torch.arange(tokens.shape[1], device=choice.device)
    exists = nodes < count[:, None]
    decided = start >= 0
    base = start.clamp_min(0)
    node = torch.full_like(start, -1)
    path = torch.full((len(start), drafts.depth), -1, dtype=torch.int64, device=choice.device)
    going = decided
    for depth in range(drafts.depth):
        below = exists & (parents == node[:, None])
        if lead is None:
            below = below & (tokens == choice[base + 1 + node][:, None])
        else:
            going = going & (depth < lead)
        child = torch.where(below, nodes, len(nodes)).amin(1)
        going = going & (child < len(nodes))
        node = torch.where(going, child, node)
        path[:, depth] = torch.where(going, child, -1)
    token = torch.where(decided, choice[base + 1 + node], -1)
    found = Walked((path >= 0).sum(1), path, token)
    if out is None:
        return found
    for to, part in zip(out, found, strict=True):
        to.copy_(part)
    return out


def sound(drafted: Tensor, slots: Tensor, drafts: Drafts) -> Tensor:
    """Return how many leading drafts of each row exist, int64 [R]: verified, valid and well formed."""
    parents, tokens = drafts.parents[slots], drafts.tokens[slots]
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    bad = (tokens < 0) | (tokens >= drafts.vocab) | (parents < -1) | (parents >= nodes)
    first = torch.where(bad, nodes, len(nodes)).amin(1)
    return torch.minimum(torch.minimum(drafted, drafts.num_valid[slots]), first).clamp_min(0)


def lineage(node: Tensor, slot: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """Return the depth of each node, int64 [n], 0 for the root, and the tokens from it up, int64 [n, D], -1 padded.

    `node` int64 [n], -1 = the root, of the proposals of `slot` int64 [n]. What it says of a node that does
    not exist (`sound`) means nothing, but is in range.
    """
    if node.is_cuda:
        from specplug.runtime.device.walk_triton import lineage as launch

        return launch(node, slot, drafts)
    last = drafts.tokens.shape[1] - 1
    here, depth = node, torch.zeros_like(node)
    tokens = torch.full((len(node), drafts.depth), -1, dtype=torch.int64, device=node.device)
    for up in range(drafts.depth):
        inside = here >= 0
        depth += inside
        at = here.clamp(0, last)
        token = drafts.tokens[slot, at]
        known = inside & (token >= 0) & (token < drafts.vocab)
        tokens[:, up] = torch.where(known, token, -1)
        here = torch.where(inside, torch.minimum(drafts.parents[slot, at], here - 1), here)
    return depth, tokens
