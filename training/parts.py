"""Layers that can be trained. Those of `specplug.layers` run without gradients, partly in kernels that have none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Norm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of `x`'s shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [*, H] for `x` [*, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Cache:
    """Keys and values of the steps so far, [B, kv_heads, L, head_dim] each."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class Attention(nn.Module):
    """Attention of one layer in a training-time test: causal over step 0, and each row over its own later steps."""

    def __init__(self, like: Any, in_features: int) -> None:
        """`like`: a `specplug.layers.SelfAttention` with the same heads."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = like.heads, like.kv_heads, like.head_dim
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(in_features, queries, bias=False)
        self.k_proj = nn.Linear(in_features, keys, bias=False)
        self.v_proj = nn.Linear(in_features, keys, bias=False)
        self.o_proj = nn.Linear(queries, like.o_proj.weight.shape[0], bias=False)

    def forward(self, x: Tensor, table: Tensor, cache: Cache) -> Tensor:
        """Return [B, L, H] for one step's `x` [B, L, in_features], whose keys and values join `cache`.

        `table` float32 [L, head_dim]: cosines and sines of the rows' positions, as `specplug.layers.Rotary` keeps them.
        """
        q, k, v = (
            project(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, table), turned(k, table)
        cache.keys.append(k)
        cache.values.append(v)
        if len(cache.keys) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = self._later(q, cache)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _later(self, q: Tensor, cache: Cache) -> Tensor:
        length = q.shape[2]
        # The query heads of one key head side by side: [B, kv_heads, group, L, head_dim].
        count, heads = q.shape[:2]
        grouped = q.reshape(count, self.kv_heads, heads // self.kv_heads, length, self.head_dim) * self.head_dim**-0.5
        shape = (*grouped.shape[:4], length)
        first = grouped.flatten(2, 3) @ cache.keys[0].transpose(2, 3)
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [first.view(shape).masked_fill(hidden, float("-inf"))]
        scores += [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True).to(q.dtype) for key in cache.keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = (weights[..., :length].flatten(2, 3) @ cache.values[0]).view(grouped.shape)
        for number, value in enumerate(cache.values[1:]):
            out = out + weights[..., length + number, None] * value.unsqueeze(2)
        return out.flatten(1, 2)


class Layer(nn.Module):
    """A Llama layer, its parts named as checkpoints name them."""

    def __init__(self, like: Any, hidden: int, eps: float) -> None:
        """`like`: a `specplug.layers.DecoderLayer` of the same sizes."""
        super().__init__()
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = Attention(like.self_attn, hidden)
        self.mlp = GatedMLP(hidden, like.mlp.down_proj.weight.shape[1])

    def forward(self, x: Tensor, table: Tensor, cache: Cache) -> Tensor:
        """Return [B, L, H] for `x` [B, L, H]; see `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), table, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Return `x` [B, heads, L, head_dim] rotated as `specplug.layers.apply_rotary` does."""
    cos, sin = table.chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def start_layer(layer: Any, like: Any, skip: int = 0) -> None:
    """Copy the weights of a `specplug.layers.DecoderLayer`. The first `skip` input columns of q, k and v, which it does
    not have, begin near 0."""
    copied = {**dict(like.self_attn.qkv.part_tensors()), **dict(like.mlp.gate_up.part_tensors())}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight.normal_(std=0.02)
        weight[:, skip:].copy_(copied[f"{name}.weight"])
    for name in ("gate_proj", "up_proj"):
        getattr(layer.mlp, name).weight.copy_(copied[f"{name}.weight"])
    layer.mlp.down_proj.weight.copy_(like.mlp.down_proj.weight)
    layer.self_attn.o_proj.weight.copy_(like.self_attn.o_proj.weight)
    layer.post_attention_layernorm.weight.copy_(like.post_attention_layernorm.weight)
