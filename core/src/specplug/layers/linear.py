"""Linear maps, alone or several of one input stacked into one matrix product."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_TALL = 8192
"""Output width from which `_tall_product` beats the library's own product for few rows on a CPU."""
_FEW, _CHUNK = 24, 8
"""Rows up to which it is used, and rows it takes at a time."""


def _tall_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` for a few rows `x` [n, in] and a very tall `weight` [out, in], on a CPU.

    BLAS is slow there: one row is a product of one thread, and 2 to 16 rows cost many times one. With
    the matrix on the left and 2 to 8 columns at a time the weights are streamed once per chunk, by all
    threads (measured in benchmarks/README.md).
    """
    if len(x) == 1:
        return torch.mm(weight, x.repeat(2, 1).T)[:, :1].T
    out = x.new_empty(len(x), len(weight))
    for start in range(0, len(x), _CHUNK):
        out[start : start + _CHUNK] = torch.mm(weight, x[start : start + _CHUNK].T).T
    return out


class Linear(nn.Module):
    """``x @ weight.T + bias`` with `weight` [out, in]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = empty(out_features, in_features)
        self.bias = empty(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return [*, out] for `x` [*, in]."""
        if x.is_cpu and x.dim() == 2 and len(x) <= _FEW and len(self.weight) >= _TALL and self.bias is None:
            return _tall_product(x, self.weight)
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several linear maps of one input as one: checkpoints store the parts, this computes them together.

    `parts` maps each part's name to its width, in output order. The output is the parts' outputs side
    by side; split it with the same widths.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = dict(parts)

    def part_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``("<part>.weight", view)`` and ``("<part>.bias", view)``: what a checkpoint stores."""
        start = 0
        for name, width in self.parts.items():
            yield f"{name}.weight", self.weight[start : start + width]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + width]
            start += width
