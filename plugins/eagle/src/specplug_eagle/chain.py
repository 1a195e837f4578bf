"""A chain: one token per forward of the head, the likeliest one or a draw. R rows, H hidden size, D depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specplug import KVPart, KVStep, KVView, Proposal, StepView
from specplug_eagle.heads import Head


class Chain:
    """Drafts 1 to `depth` tokens; the D-th draft stands D rows above the root's."""

    def __init__(self, head: Head, kv: KVView, depth: int, *, last_position: int, sampled: bool) -> None:
        """`last_position`: of the head's rotary table; `sampled`: the core draws (`Proposal.draw`)."""
        self._head = head
        self._kv = kv
        self._last_position = last_position
        self._sampled = sampled
        self._patterns: list[Any] = [kv.pattern(f"draft {node + 1}", 1, offset=node) for node in range(depth - 1)]

    def __call__(self, step: StepView, out: Proposal, depth: int, state: Tensor, hidden: Tensor) -> None:
        """Propose `depth` tokens for each row. `state` makes the first, `hidden` goes on, [R, H] each."""
        index = step.kv_len + torch.arange(depth - 1, device=step.kv_len.device)[:, None]
        positions = index.clamp_max(self._last_position)  # beyond it lie drafts that nobody asked for
        greedy: list[Tensor] = []
        for node in range(depth):
            logits = self._head.logits(state)
            if self._sampled:
                token = out.draw(step, node + 1, logits, self._head.target_ids)
            else:
                token = logits.argmax(-1)
                if self._head.target_ids is not None:
                    token = self._head.target_ids[token]
                greedy.append(token)
            if node + 1 < depth:
                attention = KVStep(self._kv, [KVPart(self._patterns[node], index[node][:, None])])
                state, hidden = self._head(token, hidden, positions[node], attention)
        if greedy:
            out.tokens[step.slots, :depth] = torch.stack(greedy, 1)
        out.num_valid[step.slots] = out.limit[step.slots].clamp_max(depth)
