"""Linear maps, alone or several of one input stacked into one matrix product."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CHUNK = 8
"""Rows that a turned product takes at a time."""
_LEAST = 2**17
"""Weights from which turning pays for the copy."""


def _turns(rows: int, inner: int, outer: int) -> bool:
    """Whether `_turned` beats the library's own product in float32 on a CPU (measured: benchmarks/README.md).

    One row gains from the second thread, where the library uses one only. More rows gain while all of them stay in
    the first-level cache (20 KB), or when so many weights pass that reading them once is what matters.
    """
    if inner * outer < _LEAST:
        return False
    if rows == 1:
        return inner <= 1024 and outer >= 2048
    return rows <= 3 * _CHUNK if outer >= 8192 else rows <= _CHUNK and rows * inner <= 5120


def _turned(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` [n, out] for a few rows `x` [n, in] and `weight` [out, in], the matrix on the left.

    BLAS is slow with few rows on the left: 2 to 8 cost many times one. With 2 to 8 columns on the right the weights
    are streamed once per chunk, by all threads.
    """
    if len(x) == 1:
        return torch.mm(weight, x.repeat(2, 1).T)[:, :1].T.contiguous()
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
        if x.is_cpu and x.dtype == torch.float32 and x.dim() == 2 and _turns(len(x), x.shape[1], len(self.weight)):
            out = _turned(x, self.weight)
            return out if self.bias is None else out.add_(self.bias)
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
