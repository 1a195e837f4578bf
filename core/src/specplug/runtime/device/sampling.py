"""Temperature, top_k, top_p and min_p for many rows at once: the device's form of `specplug.runtime.sampler`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specplug.drafter import SamplingView


@dataclass(frozen=True, slots=True)
class Filters:
    """Which options some row uses, known on the host, so that those nobody uses cost nothing."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @property
    def any(self) -> bool:
        """Some row filters."""
        return self.top_k or self.top_p or self.min_p


def filtered(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    use: Filters,
    rows: Tensor | None = None,
) -> Tensor:
    """Return logits, float32 [n, V], whose softmax is each row's distribution; what was filtered out is -inf.

    `logits` is float32 [n, V], or [M, V] with `rows` int64 [n] saying which of them; the options are [n] each,
    `temperature` above 0. Order, meaning and ties are those of `specplug.runtime.sampler.processed_logits`:
    where a filter cuts between equal values the lowest ids stay. On CUDA, sums are rounded in another
    order, so a token at the edge of top_p may fall on the other side of it.
    """
    if logits.is_cuda:
        from specplug.runtime.device.sampling_triton import filtered as launch

        return launch(logits, temperature, top_k, top_p, min_p, use, rows)
    scaled = (logits if rows is None else logits[rows]) / temperature[:, None]
    if use.top_k or use.top_p:
        ordered, order = torch.sort(scaled, dim=1, descending=True, stable=True)
        if use.top_k:
            rank = torch.arange(scaled.shape[1], device=scaled.device)
            ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], float("-inf"))
        if use.top_p:
            probs = torch.softmax(ordered, 1)
            outside = ((probs.cumsum(1) - probs) >= top_p[:, None]) & (top_p < 1.0)[:, None]
            outside[:, 0] = False
            ordered = ordered.masked_fill(outside, float("-inf"))
        scaled = torch.empty_like(scaled).scatter_(1, order, ordered)
    if use.min_p:
        floor = scaled.amax(1) + min_p.log()  # min_p 0: -inf, below which nothing is
        scaled = scaled.masked_fill(scaled < floor[:, None], float("-inf"))
    return scaled


class SlotOptions:
    """The sampling options of every slot, on the device, [S+1] each; a greedy slot's temperature is 0."""

    def __init__(self, slots: int, device: torch.device) -> None:
        rows = slots + 1
        self.every = SamplingView(
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int64, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
            choice=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        """Those of all slots, [S+1] each."""

    def set(
        self, slot: int, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, choice: int
    ) -> None:
        """Set one slot's options, without waiting for the device."""
        # A number travels with the launch; a tensor would be a copy.
        self.every.temperature[slot].fill_(temperature)
        self.every.top_k[slot].fill_(top_k)
        self.every.top_p[slot].fill_(top_p)
        self.every.min_p[slot].fill_(min_p)
        self.every.seed[slot].fill_(seed)
        self.every.choice[slot].fill_(choice)

    def view(self, slots: Tensor) -> SamplingView:
        """Return the options of `slots`, int64 [R]."""
        every = self.every
        return SamplingView(
            temperature=every.temperature[slots],
            top_k=every.top_k[slots],
            top_p=every.top_p[slots],
            min_p=every.min_p[slots],
            seed=every.seed[slots],
            choice=every.choice[slots],
        )
