"""The assistant: layers of queries over another model's KV. R rows, one query each; T hidden size of the target.

Gemma 4's own blocks (norms before and behind attention and feed-forward, a scalar behind each block, scores without
a scale), as transformers' `Gemma4AssistantForCausalLM` states them; no weights for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specplug.layers import FusedLinear, Linear, RMSNorm, apply_rotary
from specplug_mtp.frozen_sizes import AssistantSizes, Frequencies, ReadingLayer

Attend = Callable[[int, Tensor], Tensor]
"""``attend(layer, q)``: attention of `q` [R, heads, head_dim] over what the assistant's `layer` reads, scale 1."""
Angles = Mapping[str, tuple[Tensor, Tensor]]
"""Cosine and sine [R, 1, head_dim / 2] by kind of layer."""

_NEVER = float("-inf")


class Assistant(nn.Module):
    """Makes a token and the next state out of a token and a state. Its names are the checkpoint's."""

    def __init__(self, sizes: AssistantSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def linear(wide: int, out: int) -> Linear:
            return Linear(wide, out, dtype=dtype, device=device)

        self.pre_projection = linear(2 * sizes.backbone_size, sizes.hidden_size)
        self.model = _Trunk(sizes, dtype=dtype, device=device)
        self.post_projection = linear(sizes.hidden_size, sizes.backbone_size)
        self.masked_embedding: Clusters | None = None
        if sizes.centroids is not None:
            self.masked_embedding = Clusters(sizes, dtype=dtype, device=device)
        self.sizes = sizes
        self._dtype = dtype
        self._frequencies = {kind: frequencies(rope).to(device) for kind, rope in sizes.rope.items()}

    def angles(self, position: Tensor) -> Angles:
        """Return the angles of queries at `position` int64 [R]."""
        found = {}
        for kind, per_token in self._frequencies.items():
            turn = position.float()[:, None, None] * per_token
            found[kind] = turn.cos().to(self._dtype), turn.sin().to(self._dtype)
        return found

    def forward(self, embedded: Tensor, state: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Return [R, H], behind the final norm.

        `embedded` [R, T]: the last token in the target's embedding, scaled as the target scales it; `state` [R, T].
        """
        x = self.pre_projection(torch.cat((embedded, state), -1))
        return self.model(x, angles, attend)  # type: ignore[no-any-return]

    def candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits [R, n] of `hidden` [R, H] and their token ids [R, n]; None: all tokens, in order."""
        head = self.model.embed_tokens
        if self.masked_embedding is None:
            return head(hidden), None
        ids = self.masked_embedding(hidden)
        return torch.einsum("rh,rnh->rn", hidden, F.embedding(ids, head.weight)), ids

    def best(self, hidden: Tensor, banned: Tensor | None = None) -> Tensor:
        """Return the likeliest token, int64 [R], the lowest of equals; `banned` bool [V] are none."""
        logits, ids = _without(*self.candidates(hidden), banned)
        if ids is None:
            return logits.argmax(-1)
        top = logits == logits.amax(-1, keepdim=True)
        return ids.masked_fill(~top, len(self.model.embed_tokens.weight) - 1).amin(-1)

    def logits(self, hidden: Tensor, banned: Tensor | None = None) -> Tensor:
        """Return logits [R, V]; -inf for what is `banned` or in no chosen cluster."""
        logits, ids = _without(*self.candidates(hidden), banned)
        if ids is None:
            return logits
        whole = logits.new_full((len(logits), len(self.model.embed_tokens.weight)), _NEVER)
        return whole.scatter_(1, ids, logits)


class Clusters(nn.Module):
    """Chooses the clusters of the vocabulary whose tokens get logits."""

    token_ordering: Tensor

    def __init__(self, sizes: AssistantSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert sizes.centroids is not None
        self.centroids = Linear(sizes.hidden_size, sizes.centroids, dtype=dtype, device=device)
        self.register_buffer("token_ordering", torch.empty(sizes.vocab_size, dtype=torch.int64, device=device))
        self._shape = sizes.centroids, sizes.vocab_size // sizes.centroids
        self._chosen = sizes.chosen

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the token ids, int64 [R, n], of the clusters nearest to `hidden` [R, H]."""
        chosen = self.centroids(hidden).topk(self._chosen, -1).indices
        return self.token_ordering.view(self._shape)[chosen].flatten(1)


class _Trunk(nn.Module):
    def __init__(self, sizes: AssistantSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        # The head: nothing is embedded with it, the target embeds what the assistant is fed.
        self.embed_tokens = Linear(sizes.hidden_size, sizes.vocab_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            _Layer(number, sizes, layer, dtype=dtype, device=device) for number, layer in enumerate(sizes.layers)
        )
        self.norm = RMSNorm(sizes.hidden_size, sizes.norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        for layer in self.layers:
            x = layer(x, angles, attend)
        return self.norm(x)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    layer_scalar: Tensor

    def __init__(
        self, number: int, sizes: AssistantSizes, layer: ReadingLayer, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(sizes.hidden_size, sizes.norm_eps, dtype=dtype, device=device)

        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = _Queries(number, sizes, layer, dtype=dtype, device=device)
        self.mlp = _FeedForward(sizes, dtype=dtype, device=device)
        self.register_buffer("layer_scalar", torch.empty(1, dtype=dtype, device=device))

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), angles, attend))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class _Queries(nn.Module):
    def __init__(
        self, number: int, sizes: AssistantSizes, layer: ReadingLayer, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        width = layer.heads * layer.head_dim
        self.q_proj = Linear(sizes.hidden_size, width, dtype=dtype, device=device)
        self.q_norm = RMSNorm(layer.head_dim, sizes.norm_eps, dtype=dtype, device=device)
        self.o_proj = Linear(width, sizes.hidden_size, dtype=dtype, device=device)
        self._number, self._layer = number, layer

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        q = self.q_norm(self.q_proj(x).view(len(x), self._layer.heads, self._layer.head_dim))
        attended = attend(self._number, apply_rotary(q, *angles[self._layer.kind]))
        return self.o_proj(attended.reshape(len(x), -1))  # type: ignore[no-any-return]


class _FeedForward(nn.Module):
    def __init__(self, sizes: AssistantSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, width = sizes.hidden_size, sizes.intermediate_size
        self.gate_up = FusedLinear(hidden, {"gate_proj": width, "up_proj": width}, dtype=dtype, device=device)
        self.down_proj = Linear(width, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)  # type: ignore[no-any-return]


def frequencies(rope: Frequencies) -> Tensor:
    """Return float32 [pairs]: radians per token of each pair, 0 for those that do not turn."""
    exponent = torch.arange(0, 2 * rope.rotated, 2, dtype=torch.int64).float() / (2 * rope.pairs)
    return F.pad(1.0 / rope.theta**exponent, (0, rope.pairs - rope.rotated)) / rope.factor


def _without(logits: Tensor, ids: Tensor | None, banned: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if banned is not None:
        logits = logits.masked_fill(banned if ids is None else banned[ids], _NEVER)
    return logits, ids
