"""Attention and the block around it, as the Llama family has them. T tokens, H hidden size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specplug.layers.linear import FusedLinear, Linear
from specplug.layers.mlp import GatedMLP
from specplug.layers.norm import RMSNorm
from specplug.layers.rotary import Angles
from specplug.models.base import AttentionStep
from specplug.models.family import DecoderConfig


class SelfAttention(nn.Module):
    """Projections, optional query/key norm and rotary embedding around the attention of `layer`.

    `layer` is the number under which `attention` keeps its K and V. `in_features` (default `hidden`) is the width of
    the input, which draft layers widen; `qk_norm_eps` None means no query/key norm.
    """

    def __init__(
        self,
        layer: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        in_features: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        queries, keys = heads * head_dim, kv_heads * head_dim
        self.qkv = FusedLinear(
            hidden if in_features is None else in_features,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(queries, hidden, bias=o_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, angles: Angles, attention: AttentionStep) -> Tensor:
        """Return [T, H] for `x` [T, in_features]; `angles` are `Rotary`'s for the step."""
        tokens = x.shape[0]
        # Queries, keys and values stay views of one product: nothing below copies them.
        qkv = self.qkv(x).view(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            for norm, part in ((self.q_norm, qk[:, : self.heads]), (self.k_norm, qk[:, self.heads :])):
                norm(part, out=part)
        qk = angles.turn(qk)
        attended = attention.attend(self.layer, qk[:, : self.heads], qk[:, self.heads :], v)
        return self.o_proj(attended.reshape(tokens, -1))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, layer: int, sizes: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = SelfAttention(
            layer,
            hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            qkv_bias=sizes.qkv_bias,
            o_bias=sizes.o_bias,
            qk_norm_eps=eps if sizes.qk_norm else None,
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(hidden, sizes.intermediate_size, bias=sizes.mlp_bias, dtype=dtype, device=device)

    def enter(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the layer's normalised input and the residual stream that it comes from, [T, H] each.

        The stream is the sum of the arguments, both from the layer below (`residual` None: `x` alone). They may be
        overwritten.
        """
        return self.input_layernorm.add(x, residual)

    def forward(self, x: Tensor, residual: Tensor, angles: Angles, attention: AttentionStep) -> tuple[Tensor, Tensor]:
        """Return two tensors [T, H] whose sum is the residual stream after this layer, for the next one's `enter`.

        `x` and `residual` are what `enter` returned; they may be overwritten.
        """
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, angles, attention), residual)
        return self.mlp(x), residual
