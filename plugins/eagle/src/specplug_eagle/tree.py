"""The dynamic tree of EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4), as functions on tensors.

R rows, K children of each node that is expanded and nodes expanded at each level, C candidates. Candidates are
numbered as they are made: the K children of the root by rank, then at each further level the children of that level's
K nodes, node by node and by rank.

The paper ranks nodes by the product of the probabilities on their path. Here a node has a *cost*, the sum of the
surprisals ``-log q`` in nats: the order is the same, a long unlikely path does not underflow, and a child never costs
less than its parent, whatever is rounded. Nothing here waits for the device. Equal costs go by number, lower first.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HIGH = 1 << 32


def cheapest(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the costs, float32 [n, count], and the ids, int64, of the likeliest tokens of `logits` [n, V].

    `ids` int64 [V], below 2^32 and distinct, are the tokens' names. The likeliest comes first; of equally likely ones
    that of the lower id.
    """
    # The absolute value leaves no -0.0, and of not-a-number one that sorts behind infinity.
    cost = torch.log_softmax(logits, -1, dtype=torch.float32).abs_()
    # `topk` says nothing about ties. Bits of floats of one sign are ordered as the floats, so cost and id make one key.
    key = torch.add(ids, cost.view(torch.int32), alpha=_HIGH).topk(count, largest=False).values
    return (key >> 32).int().view(torch.float32), key & (_HIGH - 1)


def expand(cost: Tensor, below: Tensor) -> Tensor:
    """Return the costs of a level's candidates, float32 [R, K * K]: place p is a child of node ``p // K``.

    `cost` float32 [R, K] are the nodes' costs, and `below` [R, K, K] their children's own.
    """
    return (cost[:, :, None] + below).flatten(1)


def frontier(cost: Tensor, count: int) -> Tensor:
    """Return the places of the `count` cheapest of a level's candidates, int64 [R, count], the cheapest first."""
    return cost.sort(dim=1, stable=True).indices[:, :count]


def prune(cost: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` cheapest candidates, int64 [R, count], and their parents among these, -1 for the root.

    `cost` float32 [R, C] and `parents` int64 [R, C], candidates by number, -1 for the root. The cheapest comes first:
    so parents come before children, with each node come all nodes above it, and every prefix is the best tree of its
    size.
    """
    order = cost.sort(dim=1, stable=True).indices
    numbers = torch.arange(cost.shape[1], device=cost.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, numbers)
    chosen = order[:, :count]
    above = parents.gather(1, chosen)
    return chosen, torch.where(above < 0, -1, rank.gather(1, above.clamp_min(0)))
