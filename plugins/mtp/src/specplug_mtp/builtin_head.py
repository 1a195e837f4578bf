"""One MTP head: two norms, a projection, a decoder layer and a norm. n tokens, H hidden size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specplug import DraftBlock, KVStep, draft_blocks
from specplug.layers import DecoderLayer, Linear, RMSNorm, Rotary
from specplug_mtp.builtin_layout import Layout
from specplug_mtp.builtin_sizes import decoder_block, size


class ZeroCentredNorm(nn.Module):
    """``x / rms(x) * (1 + weight)`` over the last dimension, in float32 and rounded once, as Qwen3-Next's is."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape and dtype of `x` [*, width]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = normed * (1.0 + self.weight.float())
        return scaled.to(x.dtype)


class DecoderBlock(nn.Module):
    """A Llama-family layer with its rotary table, as a block of a head."""

    def __init__(self, number: int, layout: Layout, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = DecoderLayer(number, decoder_block(layout), dtype=dtype, device=device)
        self._rotary = (rotary,)  # in a tuple: one table for all heads, a part of none

    def forward(self, x: Tensor, positions: Tensor, attention: KVStep) -> Tensor:
        """Return [n, H] for `x` [n, H] at `positions` int64 [n]."""
        angles = self._rotary[0].angles(positions, x.dtype)
        out, residual = self.layer(*self.layer.enter(x, None), angles, attention)
        total: Tensor = out + residual
        return total

    def stored(self, stacked_experts: bool = False) -> nn.Module:
        """Return modules named as checkpoints name them, which share this block's storage."""
        return self.layer


class Head(nn.Module):
    """``out_norm(block(proj([embed_norm(e), hidden_norm(h)])))``, the halves swapped where the layout says so.

    What it returns feeds the output head and, where a head drafts more than one token, the next step: of all families
    the state after the norm is what goes round (DeepSeek-V3's MTP, section 2.2 of arXiv 2412.19437, trains one step).
    """

    def __init__(
        self, layout: Layout, block: DecoderBlock | DraftBlock, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, eps = size(layout.config, "hidden_size"), float(layout.config.get("rms_norm_eps", 1e-6))
        norm = ZeroCentredNorm if layout.zero_centred else RMSNorm
        self.embed_norm = norm(hidden, eps, dtype=dtype, device=device)
        self.hidden_norm = norm(hidden, eps, dtype=dtype, device=device)
        self.proj = Linear(2 * hidden, hidden, dtype=dtype, device=device)
        self.block = block
        self.out_norm = norm(hidden, eps, dtype=dtype, device=device)
        self._embedding_first = layout.embedding_first

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: KVStep) -> Tensor:
        """Return [n, H] for the next tokens' embeddings and the states before them, [n, H] each."""
        pair = self.embed_norm(embedded), self.hidden_norm(hidden)
        x = self.proj(torch.cat(pair if self._embedding_first else pair[::-1], -1))
        out: Tensor = self.out_norm(self.block(x, positions, attention))
        return out

    def stored(self, stacked_experts: bool) -> nn.Module:
        """Return modules that share this head's storage, with the names that `Layout.rename` gives."""
        shell = nn.Module()
        for name in ("embed_norm", "hidden_norm", "proj", "out_norm"):
            setattr(shell, name, getattr(self, name))
        shell.block = self.block.stored(stacked_experts)
        return shell


def heads_of(
    layout: Layout, count: int, *, stored: Sequence[str], dtype: torch.dtype, device: torch.device, max_position: int
) -> list[Head]:
    """Return the first `count` heads of `layout`, their weights uninitialised.

    `stored`: the checkpoint's tensor names, which say whether a block has experts; empty: as the config says.
    """
    if layout.block == "decoder":
        sizes = decoder_block(layout)
        rotary = Rotary.of(sizes.rope, sizes.head_dim, max_position, device=device)
        return [
            Head(layout, DecoderBlock(number, layout, rotary, dtype, device), dtype, device) for number in range(count)
        ]
    blocks = draft_blocks(_block_config(layout, count, stored), dtype=dtype, device=device)
    return [Head(layout, block, dtype, device) for block in blocks]


def _block_config(layout: Layout, count: int, stored: Sequence[str]) -> Mapping[str, Any]:
    """Return the target's config as that of a model of `count` layers, all of the head's kind."""
    dense = any(name == f"{layout.prefixes[0]}{layout.inner}mlp.gate_proj.weight" for name in stored)
    config = {**layout.config, "num_hidden_layers": count}
    if layout.block == "qwen":
        kinds = {"layer_types": ["full_attention"] * count, "mlp_only_layers": [*range(count)] if dense else []}
        return {**config, **kinds, "decoder_sparse_step": 1}
    return {**config, "first_k_dense_replace": count if dense else 0}
