"""The network that fills a block: non-causal layers over the target's states and the block (DFlash, arXiv 2602.06036).

R rows, b tokens of a block, T tokens of a step, H hidden size, L layers, k KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.layers import Angles, DecoderLayer, Embedding, Linear, RMSNorm
from specplug_dflash.formats import BlockDraft
from specplug_dflash.heads import ConfidenceHead, MarkovHead


class Attention(Protocol):
    """What `specplug.layers.DecoderLayer` attends through; a `specplug.KVStep` is one."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """Write `k` and `v`, then attend with `q`."""


class BlockModel(nn.Module):
    """What a draft checkpoint stores, under the names of `specplug_dflash.names`."""

    def __init__(
        self,
        draft: BlockDraft,
        *,
        heads: bool,
        confidence: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`heads`: with the Markov head; `confidence`: with the confidence head."""
        super().__init__()
        sizes, hidden = draft.sizes, draft.sizes.hidden_size
        self.heads, self.head_dim = sizes.kv_heads, sizes.head_dim
        self.fc = Linear(len(draft.taps) * draft.feature, hidden, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(hidden, sizes.norm_eps, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, sizes, dtype=dtype, device=device) for layer in range(len(sizes.windows))
        )
        self.norm = RMSNorm(hidden, sizes.norm_eps, dtype=dtype, device=device)
        if "embed_tokens" in draft.stored:
            self.embed_tokens = Embedding(sizes.vocab_size, hidden, dtype=dtype, device=device)
        if "lm_head" in draft.stored:
            self.lm_head = Linear(hidden, draft.head_rows, dtype=dtype, device=device)
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        maps = {"d2t": (draft.head_rows, torch.int64), "t2d": (draft.vocab, torch.bool)}
        for name, (rows, kind) in maps.items():
            # Read once, on the host.
            self.register_buffer(name, torch.zeros(rows, dtype=kind) if name in draft.stored else None)
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if heads and draft.markov is not None:
            self.markov_head = MarkovHead(
                draft.markov, hidden, draft.vocab, draft.head_rows, dtype=dtype, device=device
            )
        if confidence:
            with_markov = draft.confidence == "hidden and markov" and draft.markov is not None
            features = hidden + (draft.markov.rank if with_markov and draft.markov else 0)
            self.confidence_head = ConfidenceHead(features, dtype=dtype, device=device)

    def context_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the key and value projections of all layers as one map: weight [2Lkd, H] and bias [2Lkd], if any.

        All layers' keys come first, then all values: one product, one rotation for a whole step.
        """
        parts = [dict(layer.self_attn.qkv.part_tensors()) for layer in self._layers()]
        names = [f"{part}.{{}}" for part in ("k_proj", "v_proj")]
        weight = torch.cat([part[name.format("weight")] for name in names for part in parts])
        if "k_proj.bias" not in parts[0]:
            return weight, None
        return weight, torch.cat([part[name.format("bias")] for name in names for part in parts])

    def context(self, taps: Sequence[Tensor], angles: Angles, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Return L keys, then L values, [T, k, d] each, of tokens whose target states are `taps`, [T, Ht] each.

        The states take the place of a layer's normalised input: the same projections, and no input norm.
        """
        states: Tensor = self.hidden_norm(self.fc(torch.cat(tuple(taps), -1) if len(taps) > 1 else taps[0]))
        layers = list(self._layers())
        both = F.linear(states, weight, bias).view(len(states), 2 * len(layers) * self.heads, self.head_dim)
        keys, values = both.chunk(2, 1)
        for layer, part in zip(layers, torch.split(keys, self.heads, 1), strict=True):
            if layer.self_attn.k_norm is not None:
                layer.self_attn.k_norm(part, out=part)
        return [*torch.split(angles.turn(keys), self.heads, 1), *torch.split(values, self.heads, 1)]

    def forward(self, x: Tensor, angles: Angles, attention: Attention) -> Tensor:
        """Return the states after the final norm [R * b, H] of embeddings `x` [R * b, H]."""
        residual = None
        for layer in self._layers():
            x, residual = layer.enter(x, residual)
            x, residual = layer(x, residual, angles, attention)
        final: Tensor = self.norm.add(x, residual)[0]
        return final

    def _layers(self) -> Iterable[DecoderLayer]:
        return cast(Iterable[DecoderLayer], self.layers)
