"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn

from specplug.layers import fused


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, the statistics in float32.

    In torch the normalised value is rounded to the input's dtype before the weight is applied, as Llama's
    reference does: half-precision results depend on it. The fused kernel on CUDA rounds once, at the end:
    its results differ by at most one unit in the last place of the input's dtype, and `add` there
    normalises the sum before the sum is rounded.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a tensor of `x`'s shape and dtype, `out` where given; `x` is [*, size], and may be `out`."""
        if self._fuses(x) and (out is None or fused.fits(out)):
            return fused.rms_norm(x, self.weight, self.eps, out)
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = self.weight * (wide * scale).to(x.dtype)
        return normed if out is None else out.copy_(normed)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``norm(residual + x)`` and ``residual + x``, for `x` and `residual` of one shape [*, size].

        Without a `residual` the sum is `x` itself. On CUDA the arguments may be overwritten: use what is returned.
        """
        if residual is None:
            return self(x), x
        if self._fuses(x) and fused.fits(residual) and x.is_contiguous() and residual.is_contiguous():
            size = x.shape[-1]
            fused.add_rms_norm_(x.view(-1, size), residual.view(-1, size), self.weight, self.eps)
            return x, residual
        total = residual + x
        return self(total), total

    def _fuses(self, x: Tensor) -> bool:
        return x.dtype == self.weight.dtype and fused.fits(x)
