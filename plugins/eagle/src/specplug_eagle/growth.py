"""Growing the tree: one forward of the head for each level, over all nodes of it that go on. Then the best are kept.

R rows, K nodes expanded at each level, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import KVPart, KVStep, KVView, Proposal, StepView
from specplug_eagle import tree
from specplug_eagle.buffers import scratch_rows
from specplug_eagle.config import candidates
from specplug_eagle.heads import Head


class Growth:
    """Drafts trees of 1 to `depth` levels, of the `nodes` best candidates.

    The nodes that level L expands lie in K scratch rows from ``kv_len + (L - 1) * K`` on, at the position of the row
    that a chain's draft at that depth has, and see the committed rows and those of the nodes above them.
    """

    def __init__(self, head: Head, kv: KVView, depth: int, topk: int, nodes: int, *, last_position: int) -> None:
        """`last_position`: of the head's rotary table."""
        self._head = head
        self._kv = kv
        self._topk = topk
        self._nodes = nodes
        self._last_position = last_position
        self._pattern = kv.pattern("level", topk, mask="ancestors") if depth > 1 else None

    def __call__(self, step: StepView, out: Proposal, depth: int, state: Tensor, hidden: Tensor) -> None:
        """Propose a tree of `depth` levels for each row. `state` makes the first, `hidden` goes on, [R, H] each."""
        rows, k, device = len(step.slots), self._topk, step.slots.device
        logits = self._head.logits(state)
        ids = self._head.target_ids
        if ids is None:
            ids = torch.arange(logits.shape[-1], device=device)
        cost, token = tree.cheapest(logits, ids, k)
        costs, tokens, parents = [cost], [token], [torch.full_like(token, -1)]
        node = torch.arange(k, device=device).expand(rows, k)  # numbers of the candidates that go on
        hidden = hidden[:, None].expand(-1, k, -1).flatten(0, 1)
        beyond = scratch_rows(depth, k)
        scratch = torch.arange(beyond, device=device).view(depth - 1, 1, k)
        index = step.kv_len[:, None] + scratch
        positions = (step.kv_len[:, None] + scratch // k).clamp_max(self._last_position)
        own = torch.eye(beyond, dtype=torch.bool, device=device).view(depth - 1, k, beyond)
        first = torch.arange(rows, device=device)[:, None] * k
        seen = own[:1].repeat(rows, 1, 1)
        for level in range(depth - 1):
            attention = KVStep(self._kv, [KVPart(self._pattern, index[level], seen)])
            state, hidden = self._head(token.flatten(), hidden, positions[level].flatten(), attention)
            below, words = tree.cheapest(self._head.logits(state), ids, k)
            cost, token = tree.expand(cost, below.view(rows, k, k)), words.view(rows, k * k)
            costs.append(cost)
            tokens.append(token)
            parents.append(node[:, :, None].expand(-1, -1, k).flatten(1))
            if level + 2 < depth:
                best = tree.frontier(cost, k)
                cost, token, node = cost.gather(1, best), token.gather(1, best), candidates(level + 1, k) + best
                above = (first + best // k).flatten()
                hidden = hidden.index_select(0, above)
                seen = seen.flatten(0, 1).index_select(0, above).view_as(seen) | own[level + 1]
        count = min(self._nodes, candidates(depth, k))
        chosen, above = tree.prune(torch.cat(costs, 1), torch.cat(parents, 1), count)
        out.tokens[step.slots, :count] = torch.cat(tokens, 1).gather(1, chosen)
        out.parents[step.slots, :count] = above
        out.num_valid[step.slots] = out.limit[step.slots].clamp_max(count)
