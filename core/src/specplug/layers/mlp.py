"""The gated feed-forward block of the Llama family."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.layers import fused
from specplug.layers.linear import FusedLinear, Linear


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` [*, n] for `gate_up` [*, 2 n], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.is_contiguous() and fused.fits(gate):
        return fused.silu_and_mul(gate_up)
    return F.silu(gate) * up


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
        """Return [*, H] for `x` [*, H]."""
        return self.down_proj(silu_and_mul(self.gate_up(x)))  # type: ignore[no-any-return]
