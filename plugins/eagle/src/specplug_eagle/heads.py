"""The heads at work: EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and EAGLE-3 (arXiv 2503.01840, 3.1: 2605.09992).

Row i pairs the target's state h_i with the embedding of token i + 1 and predicts token i + 2. n rows of a forward, T
tokens of a step, H hidden size, Ht the target's, Vd rows of the logits.
"""

from __future__ import annotations

import logging
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from specplug import DraftContext, TargetView, UserError
from specplug.layers import (
    Angles,
    DecoderLayer,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    Rotary,
    SelfAttention,
    draft_vocabulary,
)
from specplug_eagle.formats import OPTION
from specplug_eagle.layout import Layout
from specplug_eagle.token_map import read_token_map

_log = logging.getLogger(__name__)


class Attention(Protocol):
    """What a `specplug.KVStep` does."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.KVStep`."""


class FirstLayer1(nn.Module):
    """EAGLE-1's first layer: attention reads its input without a norm."""

    def __init__(self, layout: Layout, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        sizes = layout.sizes
        self.self_attn = _attention(layout, sizes.hidden_size, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(sizes.hidden_size, sizes.intermediate_size, bias=sizes.mlp_bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, angles: Angles, attention: Attention) -> tuple[Tensor, Tensor]:
        """Return two tensors [n, H] whose sum is the layer's output; `x` [n, H] may be overwritten."""
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, angles, attention), x)
        return self.mlp(x), residual


class FirstLayer3(nn.Module):
    """EAGLE-3's first layer: attention reads the embedding and the state side by side, each behind a norm."""

    def __init__(self, layout: Layout, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        sizes = layout.sizes
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.normed_residual = layout.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = _attention(layout, 2 * hidden, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(hidden, sizes.intermediate_size, bias=sizes.mlp_bias, dtype=dtype, device=device)

    def forward(self, embedded: Tensor, state: Tensor, angles: Angles, attention: Attention) -> tuple[Tensor, Tensor]:
        """Return two tensors [n, H] whose sum is the layer's output, for `embedded` and `state` [n, H]."""
        x = torch.empty(len(state), 2 * state.shape[1], dtype=state.dtype, device=state.device)
        left, right = x.chunk(2, dim=1)
        self.input_layernorm(embedded, out=left)
        self.hidden_norm(state, out=right)
        attended = self.self_attn(x, angles, attention)
        # Not `add`: it may overwrite both, and neither `state` nor half of `x` is to be given away.
        residual = attended + (right if self.normed_residual else state)
        return self.mlp(self.post_attention_layernorm(residual)), residual


class Head(nn.Module):
    """A head. Its modules are named as `specplug_eagle.formats.canonical` names tensors; what is borrowed is none."""

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, layout: Layout, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        sizes = layout.sizes
        hidden, eps, width = sizes.hidden_size, sizes.norm_eps, layout.target_hidden
        self.layout = layout
        self.hidden_size = hidden
        self.max_position = layout.max_position
        """Positions it was made for; `forward` is not to be given one at or above."""
        self.rows = layout.rows
        """Vd."""
        self.target_ids: Tensor | None = None
        """Target id of each row of the logits, int64 [Vd]; None: the same."""
        states, third = len(layout.taps), layout.version == 3
        self.fc = self.fc_norm = self.input_norm = self.norm = None
        if layout.use_aux or not third:
            columns = states * width if third else 2 * hidden
            self.fc = Linear(columns, hidden, bias=layout.fc_bias, dtype=dtype, device=device)
        if layout.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps, dtype=dtype, device=device) for _ in range(states))
        if layout.norm_before_fc:
            self.input_norm = RMSNorm(states * width, eps, dtype=dtype, device=device)
        first = (FirstLayer3 if third else FirstLayer1)(layout, dtype=dtype, device=device)
        later = (DecoderLayer(layer, sizes, dtype=dtype, device=device) for layer in range(1, layout.layers))
        self.layers = nn.ModuleList((first, *later))
        if third:
            self.norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.rope = Rotary.of(sizes.rope, sizes.head_dim, layout.max_position, device=device)
        self.embed_tokens = self.lm_head = None
        if layout.embed_rows:
            self.embed_tokens = Embedding(layout.embed_rows, hidden, dtype=dtype, device=device)
        if layout.ships_head:
            self.lm_head = Linear(hidden, layout.rows, dtype=dtype, device=device)
        maps = {"d2t": (layout.rows, torch.int64, layout.d2t), "t2d": (layout.t2d, torch.bool, layout.t2d > 0)}
        for name, (size, kind, stored) in maps.items():
            self.register_buffer(name, torch.zeros(size, dtype=kind, device=device) if stored else None)
        self._ends: tuple[nn.Module, nn.Module] | None = None

    def settle(self, embed: nn.Module | None, lm_head: nn.Module | None) -> None:
        """Join the head with its embeddings and its output head, the target's where given, and with its vocabulary.

        Called once, after the weights were read. Where both sides have the same weights the target's stay.
        """
        layout = self.layout
        embed = _one(self.embed_tokens, embed)
        head = _tied(embed) if layout.tied else _one(self.lm_head, lm_head)
        if layout.token_map is not None:
            ids = torch.tensor(read_token_map(layout.token_map, layout.vocab), device=self.rope.table.device)
            head, self.target_ids = _rows(head, ids), ids
        elif layout.reduced:
            ids_or_none = draft_vocabulary(self.d2t, self.t2d, layout.rows, layout.vocab)
            self.target_ids = None if ids_or_none is None else ids_or_none.to(self.rope.table.device)
            if ids_or_none is not None and int(ids_or_none.max()) >= layout.vocab:
                raise ValueError(
                    f"t2d marks id {int(ids_or_none.max())}, the target's vocabulary ends at {layout.vocab}"
                )
        elif layout.rows > layout.vocab:
            head = _rows(head, slice(0, layout.vocab))
        elif layout.rows < layout.vocab:
            self.target_ids = torch.arange(layout.rows, device=self.rope.table.device)
        if self.target_ids is not None:
            self.rows = len(self.target_ids)
        else:
            self.rows = min(layout.rows, layout.vocab)
        self.embed_tokens = self.lm_head = self.d2t = self.t2d = None
        self._ends = embed, head

    def project(self, taps: tuple[Tensor, ...]) -> Tensor:
        """Return what stands beside the token in each row, [T, H], for the states read of the target, [T, Ht] each.

        Where the head takes the target's final state as it is, that very tensor.
        """
        if not self.layout.use_aux:
            return taps[0]
        assert self.fc is not None
        if self.fc_norm is None:
            joined = torch.cat(taps, dim=1)
        else:
            joined = torch.empty(len(taps[0]), self.fc.weight.shape[1], dtype=taps[0].dtype, device=taps[0].device)
            for norm, tap, part in zip(self.fc_norm, taps, joined.chunk(len(taps), dim=1), strict=True):
                norm(tap, out=part)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return self.fc(joined)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """Return the states [n, H] that `logits` takes, and those that stand beside the next token.

        `tokens` int64 [n] are target ids, `hidden` [n, H] comes from `project` or is the second result of an earlier
        row, and is not changed; `positions` int64 [n] are the state's, one below the token's. Both results may be one.
        """
        assert self._ends is not None
        embedded = self._ends[0](tokens)
        angles = self.rope.angles(positions, hidden.dtype)
        first = self.layers[0]
        if self.layout.version == 1:
            assert self.fc is not None
            x, residual = first(self.fc(torch.cat((embedded, hidden), dim=1)), angles, attention)
        else:
            x, residual = first(embedded, hidden, angles, attention)
        for each in self.layers[1:]:
            layer = cast(DecoderLayer, each)
            x, residual = layer.enter(x, residual)
            x, residual = layer(x, residual, angles, attention)
        if self.norm is None:
            state = residual + x
            return state, state
        normed, plain = self.norm.add(x, residual)
        return normed, normed if self.layout.norm_output else plain

    def logits(self, state: Tensor) -> Tensor:
        """Return logits [n, Vd] of states [n, H]."""
        assert self._ends is not None
        logits: Tensor = self._ends[1](state)
        return logits if self.layout.logit_scale == 1.0 else logits * self.layout.logit_scale


def load(layout: Layout, ctx: DraftContext, target: TargetView) -> Head:
    """Return the head of `layout`, its weights read and the target's parts borrowed.

    A tensor missing or unexpected, and maps that contradict each other, are a `UserError` with the list.
    """
    head = Head(layout, dtype=ctx.dtype, device=ctx.device)
    draft = ctx.facts.draft
    assert draft is not None
    try:
        ctx.load(head, "draft", lambda stored: destination(layout, stored))
        parts = layout.borrows(ctx.facts)
        head.settle(
            target.borrow("embed_tokens") if "embed_tokens" in parts else None,
            target.borrow("lm_head") if "lm_head" in parts else None,
        )
    except (UserError, ValueError) as error:
        raise UserError(f"{OPTION} {draft.path}: {error}") from error
    _log.info("the head reads %s of the target, %s", [tap.at for tap in layout.taps], layout.taps_because)
    return head


def destination(layout: Layout, stored: str) -> str | None:
    """Return the name in `Head` of a stored tensor; None for what is computed, or the target's own."""
    assert layout.names is not None
    name = layout.names[stored]
    if name.endswith("rotary_emb.inv_freq") or (layout.version == 1 and name == "embed_tokens.weight"):
        return None
    return name


def _attention(layout: Layout, width: int, *, dtype: torch.dtype, device: torch.device) -> SelfAttention:
    sizes = layout.sizes
    return SelfAttention(
        0,
        sizes.hidden_size,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        in_features=width,
        qkv_bias=sizes.qkv_bias,
        o_bias=sizes.o_bias,
        qk_norm_eps=sizes.norm_eps if sizes.qk_norm else None,
        dtype=dtype,
        device=device,
    )


def _one(own: nn.Module | None, lent: nn.Module | None) -> nn.Module:
    """Return the target's module where there is none of one's own, or where it computes the same."""
    if own is None or lent is None:
        found = own if lent is None else lent
        assert found is not None
        return found
    theirs, ours = getattr(lent, "weight", None), cast(Tensor, own.weight)
    plain = type(lent) in (type(own), nn.Embedding, nn.Linear) and getattr(lent, "bias", None) is None
    if not (plain and isinstance(theirs, Tensor) and theirs.dtype == ours.dtype):
        return own
    return lent if torch.equal(theirs, ours) else own


def _tied(embed: nn.Module) -> nn.Module:
    """Return an output head that has the weight of `embed`."""
    weight = cast(Tensor, embed.weight)
    head = Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def _rows(head: nn.Module, rows: Tensor | slice) -> nn.Module:
    """Return an output head of the given rows of `head`."""
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UserError("the target's output head has no rows to choose from; leave --speculative-eagle-token-map out")
    chosen = weight[rows]
    part = Linear(chosen.shape[1], chosen.shape[0], bias=bias is not None, dtype=chosen.dtype, device="meta")
    part.weight = nn.Parameter(chosen, requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias[rows], requires_grad=False)
    return part
