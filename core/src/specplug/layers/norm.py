"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, the statistics in float32.

    The normalised value is rounded to the input's dtype before the weight is applied, as Llama's
    reference does: half-precision results depend on it.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of `x`'s shape and dtype; `x` is [*, size]."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
