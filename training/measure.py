"""Loss and counts of a draft over a batch, and the gradients of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import target
import torch
from chats import Batch, moved
from draft import Draft
from torch import Tensor

_ROOM = 1 << 30
"""Bytes of logits that exist at once, the target's and the draft's together."""


@dataclass(slots=True)
class Sums:
    """Loss and accuracy summed over rows, for each step; float64 [steps] on the device."""

    loss: Tensor
    right: Tensor
    """Rows whose draft of this step and of all before are what the target finds likeliest."""
    tried: Tensor
    """Rows right up to the step before, of those that the chat does not end before."""
    rows: Tensor

    @classmethod
    def zero(cls, steps: int, device: torch.device) -> Sums:
        """Return sums of nothing."""
        return cls(*(torch.zeros(steps, dtype=torch.float64, device=device) for _ in range(4)))

    def add(self, other: Sums) -> None:
        """Add `other` in place."""
        self.loss += other.loss
        self.right += other.right
        self.tried += other.tried
        self.rows += other.rows

    def figures(self) -> dict[str, Any]:
        """Return by depth the loss, and the share of right drafts among the rows that were right up to there; and the
        length of text that a chain of all steps would be good for on average, begun at every token alike."""

        def shares(part: Tensor, whole: Tensor) -> list[float]:
            return [round(each, 4) for each in (part / whole.clamp(min=1)).tolist()]

        loss, accepted = shares(self.loss, self.rows), shares(self.right, self.tried)
        drafted = sum(math.prod(accepted[:depth]) for depth in range(1, len(accepted) + 1))
        return {"loss": loss, "accepted": accepted, "length": round(1 + drafted, 4)}


def precision(device: torch.device) -> torch.autocast:
    """Return the context that a draft's products are computed in: bfloat16 on CUDA, as they come elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def measure(
    draft: Draft, batch: Batch, reading: target.Reading, picked: Tensor, steps: int, *, learn: bool = False
) -> Sums:
    """Return the sums of every step over the rows ``batch.rows[picked]``; `picked` int64, ascending, on the CPU.

    With `learn`, the gradients of the loss are added to the draft's parameters': the mean over its rows of each step's
    loss, weighted by `Draft.weights`. A row's loss is minus the sum over the draft's vocabulary of p log q: what of the
    target's p lies outside cannot be drafted, and counts for nothing.

    Logits over a whole vocabulary are too many to keep, so they are made for some rows at a time, of all steps
    together, and their gradient is taken at once: what is kept is the gradient of the states that they were made from.
    """
    device = batch.tokens.device
    sums, last = Sums.zero(steps, device), len(batch.rows) - 1
    # `step` rows on stands the same token of the same chat; where the chat has ended, nothing counts.
    ahead = (picked[:, None] + torch.arange(steps)).clamp_max(last)
    picked = moved(picked, device)
    here = batch.left[picked, None] >= torch.arange(steps, device=device)
    sums.rows += here.sum(0)
    weights = torch.tensor(draft.weights(steps), device=device)
    share = weights / weights.sum() / sums.rows.clamp(min=1)
    with torch.set_grad_enabled(learn), precision(device):
        states = torch.stack(draft.states(batch, reading, picked, steps))
    gradient = torch.empty_like(states)
    rows_of = draft.target.vocab_size if draft.ids is None else len(draft.ids)
    chunk = max(1, _ROOM // (4 * (draft.target.vocab_size + steps * rows_of)))
    for start in range(0, len(picked), chunk):
        part = slice(start, start + chunk)
        rows, place = (moved(each, device) for each in without_doubles(ahead[part].T))
        p, best = target.says(draft.target, reading.final[rows], draft.ids)
        leaf, counted = states[:, part].detach().requires_grad_(learn), here[part].T
        with torch.set_grad_enabled(learn), precision(device):
            logits = draft.logits(leaf)
            wide, wanted = logits.float(), p[place]
            each = wanted.sum(-1) * wide.logsumexp(-1) - (wanted * wide).sum(-1)
            loss = (each * counted).sum(1)
        if learn:
            (loss * share).sum().backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None
            gradient[:, part] = leaf.grad
        right = ((draft.drafted(logits.detach()) == best[place]) & counted).cumprod(0)
        sums.loss += loss.detach()
        sums.right += right.sum(1)
        sums.tried += torch.cat((counted[:1], right[:-1].bool() & counted[1:])).sum(1)
    if learn:
        torch.autograd.backward(states, gradient)
    return sums


def without_doubles(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `rows` (int64, on the CPU) holds, ascending and each once, and where each of `rows` is among these.

    On the host, because a device would have to be waited for: nobody knows how many they are.
    """
    first = int(rows.min())
    held = torch.zeros(int(rows.max()) - first + 1, dtype=torch.bool)
    held[rows - first] = True
    return held.nonzero().flatten() + first, (held.cumsum(0) - 1)[rows - first]
