"""The heads that make a block sequential: Markov bias and confidence (DSpark, arXiv 2607.05147).

R rows, H hidden size, r rank, V vocabulary of the target, D of the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specplug.layers import Embedding, Linear
from specplug_dflash.formats import Markov


class MarkovHead(nn.Module):
    """A low-rank bias on a slot's logits that follows from the token before it, a target id.

    With ``w = W1[previous]``, the slot's final-normed state x and, for ``rnn``, a state s that starts at 0:

    - ``vanilla``: ``W2 w``;
    - ``gated``: ``W2 (sigmoid(G [x; w]) * w)``;
    - ``rnn``: ``g, c, o = J [s; w; x]``, ``s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``, ``W2 tanh(o)``.
    """

    def __init__(
        self, form: Markov, hidden: int, vocab: int, rows: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`vocab`: rows of W1, the target's ids; `rows`: of W2, the draft's."""
        super().__init__()
        rank = form.rank
        self.kind, self.rank = form.kind, rank
        self.markov_w1 = Embedding(vocab, rank, dtype=dtype, device=device)
        self.markov_w2 = Linear(rank, rows, dtype=dtype, device=device)
        if form.kind == "gated":
            self.gate_proj = Linear(hidden + rank, rank, bias=True, dtype=dtype, device=device)
        elif form.kind == "rnn":
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank, bias=True, dtype=dtype, device=device)

    def start(self, rows: int) -> Tensor:
        """Return the state before the block's first slot, [rows, r]."""
        weight = self.markov_w1.weight
        return torch.zeros(rows, self.rank, dtype=weight.dtype, device=weight.device)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias [R, D] of one slot and the state behind it [R, r].

        `previous` [R, r] is W1 of the token before, `hidden` [R, H] the slot's state, `state` [R, r].
        """
        if self.kind == "vanilla":
            return self.markov_w2(previous), state
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, previous), -1)))
            return self.markov_w2(gate * previous), state
        keep, candidate, output = self.joint_proj(torch.cat((state, previous, hidden), -1)).chunk(3, -1)
        keep = torch.sigmoid(keep)
        state = keep * state + (1 - keep) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), state


class ConfidenceHead(nn.Module):
    """Predicts how likely a slot's draft is accepted, those before it being accepted."""

    def __init__(self, features: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.proj = Linear(features, 1, bias=True, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """Return float32 [R] in 0..1 for a slot's state [R, H] and, where it reads it, W1 of the token before [R, r].

        The slot's own draft is not among the arguments: whether it exists must not depend on what it is.
        """
        features = hidden if previous is None else torch.cat((hidden, previous), -1)
        return torch.sigmoid(self.proj(features).float()).squeeze(-1)
