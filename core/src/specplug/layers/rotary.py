"""Rotary position embedding, with the frequency scalings of the Llama family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.layers import fused
from specplug.models.family import Rope


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How the frequencies are stretched for a longer context.

    ``linear`` divides all of them by `factor`. ``llama3`` divides those whose wavelength exceeds
    ``original_max_position / low_freq_factor`` tokens, keeps those under
    ``original_max_position / high_freq_factor`` and blends in between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> Tensor:
    """Return float32 [head_dim / 2]: radians per token of each rotated pair."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    plain = 1.0 / theta**exponent
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return stretched
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_position / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched + blend * plain
    result = torch.where(wavelength > scaling.original_max_position / low, stretched, blended)
    return torch.where(wavelength < scaling.original_max_position / high, plain, result)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, head_dim], pairing dimension i with i + head_dim / 2.

    `cos` and `sin` [T, 1, head_dim / 2] come from `Rotary`, in `x`'s dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Rotary(nn.Module):
    """Table of cosines and sines for the positions 0 to `max_position` - 1, in float32."""

    table: Tensor

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        theta: float,
        scaling: RotaryScaling | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(head_dim, theta, scaling))
        # [max_position, head_dim], cosines then sines: one lookup per step.
        self.register_buffer("table", torch.cat((angles.cos(), angles.sin()), dim=-1).to(device), persistent=False)
        self.max_position = max_position

    @classmethod
    def of(cls, rope: Rope, head_dim: int, max_position: int, *, device: torch.device | str | None = None) -> Rotary:
        """Return the table that a config's `rope` asks for."""
        return cls(head_dim, max_position, rope.theta, _scaling(rope), device=device)

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), [T, 1, head_dim / 2] each in `dtype`, for `positions` int64 [T].

        Compute once per step and pass to `apply_rotary` in every layer. A position outside the table
        is an IndexError on CPU; on CUDA it counts as the nearest one inside.
        """
        cos, sin = F.embedding(self._inside(positions), self.table).to(dtype).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Return what turns queries and keys in `dtype` at `positions` int64 [T], as `forward` does."""
        return Angles(self, self._inside(positions), dtype)

    def _inside(self, positions: Tensor) -> Tensor:
        # Cheaper than what a kernel that reads beyond the table does: an assertion there ends the process.
        return positions.clamp(0, self.max_position - 1) if positions.is_cuda else positions


class Angles:
    """The angles of one step's tokens. Made once per forward by `Rotary.angles`, used in every layer."""

    def __init__(self, rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._positions = positions
        self._dtype = dtype
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def turn(self, x: Tensor) -> Tensor:
        """Return `x` [T, heads, head_dim] rotated as `apply_rotary` does; `x` is overwritten where a kernel does it.

        The kernel multiplies in float32 and rounds once, where torch rounds cosine, sine and each product. Give it
        queries and keys side by side: one pass over both, and no copy of a view of the fused projection's output.
        """
        if x.dtype == self._dtype and x.shape[-1] == self._rotary.table.shape[-1] and fused.fits_rotary(x):
            fused.rotate_(x, self._rotary.table, self._positions)
            return x
        if self._cos_sin is None:
            self._cos_sin = self._rotary(self._positions, self._dtype)
        return apply_rotary(x, *self._cos_sin)


def _scaling(rope: Rope) -> RotaryScaling | None:
    if rope.kind == "linear":
        return RotaryScaling("linear", rope.factor)
    if rope.kind == "llama3":
        return RotaryScaling(
            "llama3", rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
        )
    return None
