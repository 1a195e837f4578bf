"""Token embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """Rows of `weight` [vocab, H] by token id."""

    def __init__(
        self, vocab: int, hidden: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, dtype=dtype, device=device), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [T, H] for `tokens` int64 [T]."""
        return F.embedding(tokens, self.weight)
