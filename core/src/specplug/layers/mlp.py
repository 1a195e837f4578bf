"""The gated feed-forward block of the Llama family."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.layers.linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = FusedLinear(
            hidden, {"gate_proj": width, "up_proj": width}, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = Linear(width, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] for `x` [T, H]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]
