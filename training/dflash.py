"""A DFlash draft (arXiv 2602.06036), saved as its authors name it.

Row i begins a block: the anchor is token i + 1 at position i + 1, masks stand behind it, and one forward fills the
block, place 1 + s of it being the draft of step s. Every layer reads, beside the block itself in both directions, keys
and values of the target's states of tokens 0 to i, which take the place of a normalised input. Anchors are drawn anew
for every batch. Embedding, mask row and head are the target's and are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import chats
import torch
from chats import Batch, Chat
from draft import Draft, check_boundaries, read_stored, sizes
from parts import GatedMLP, Norm, start_layer, turned
from target import Reading
from torch import Tensor, nn
from torch.nn import functional as F

from specplug import UserError
from specplug.models.decoder import Decoder

_TAPS = 3
"""Boundaries that are read by default, evenly spaced from 2 to n - 2 of n layers. The published drafts read as many as
they have layers, which are more than two."""


class BlockAttention(nn.Module):
    """Attention of blocks over the context before each, and over themselves; queries and keys are normalised."""

    def __init__(self, like: Any, hidden: int, eps: float) -> None:
        """`like`: a `specplug.layers.SelfAttention` with the same heads."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = like.heads, like.kv_heads, like.head_dim
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = Norm(self.head_dim, eps)
        self.k_norm = Norm(self.head_dim, eps)

    def forward(self, x: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Return [B, N, H] for the blocks' rows `x` [B, N, H] and the states `context` [B, L, H].

        `tables`: cosines and sines at the positions of `x`, float32 [B, 1, N, head_dim], and of `context`, [L,
        head_dim]; `seen` bool [B, 1, N, L + N].
        """
        queries = turned(self.q_norm(self._split(self.q_proj(x))), tables[0])
        here = turned(self.k_norm(self._split(self.k_proj(x))), tables[0])
        there = turned(self.k_norm(self._split(self.k_proj(context))), tables[1])
        keys = torch.cat((there, here), 2)
        values = self._split(torch.cat((self.v_proj(context), self.v_proj(x)), 1))
        group = self.heads // self.kv_heads
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        """Return [B, heads, n, head_dim] of [B, n, heads * head_dim]."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class BlockLayer(nn.Module):
    """One layer, its parts named as stored."""

    def __init__(self, like: Any, hidden: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = BlockAttention(like.self_attn, hidden, eps)
        self.mlp = GatedMLP(hidden, like.mlp.down_proj.weight.shape[1])


class DFlash(Draft):
    """A projection of the target's states, and a few layers that fill a block from it."""

    architecture = "DFlashDraftModel"
    takes: ClassVar[Mapping[str, Any]] = {"at": None, "layers": 2, "block": 8, "mask": None, "anchors": 0.25}

    def __init__(
        self, target: Decoder, at: Sequence[int], layers: int, block: int, mask: int, anchors: float = 1.0
    ) -> None:
        """`at`: boundaries read; `block` tokens, the anchor included; `mask`: the id whose embedding masks have;
        `anchors`: share of the rows that begin a block in training. Layers begin as the target's last."""
        super().__init__(target, at, block - 1)
        self.block, self.mask, self.anchors = block, mask, anchors
        self.longest = block - 1
        hidden, eps = target.hidden_size, target.norm.eps
        last: list[Any] = list(target.layers)[-layers:]
        self.fc = nn.Linear(len(at) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        layers_made = [BlockLayer(like, hidden, eps) for like in last]
        self.layers = nn.ModuleList(layers_made)
        self.norm = Norm(hidden, eps)
        with torch.no_grad():
            self.fc.weight.normal_(std=0.002)
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
            self.hidden_norm.weight.copy_(last[0].input_layernorm.weight)
            for layer, like in zip(layers_made, last, strict=True):
                start_layer(layer, like)
                layer.input_layernorm.weight.copy_(like.input_layernorm.weight)
            self.norm.weight.copy_(target.norm.weight)

    @classmethod
    def begin(cls, target: Decoder, known: Sequence[Chat], args: Any) -> Self:
        """See `Draft.begin`. The mask is the last of the ids that the chats use least."""
        of, vocab = len(target.layers), target.vocab_size
        if args.layers > of:
            raise UserError(f"--layers {args.layers}: the target has {of}; give 1 to as many")
        if args.mask is not None and args.mask >= vocab:
            raise UserError(f"--mask {args.mask}: the target has the ids 0 to {vocab - 1}; give one that no text holds")
        even = dict.fromkeys(round(2 + step * (of - 4) / (_TAPS - 1)) for step in range(_TAPS))
        at = check_boundaries(args.at or tuple(even), target)
        mask = chats.rarest(known, vocab) if args.mask is None else args.mask
        print(f"boundaries {at}; mask {mask}")
        return cls(target, at, args.layers, args.block, mask, args.anchors)

    @classmethod
    def load(cls, folder: Path, target: Decoder) -> Self:
        """See `Draft.load`."""
        config, tensors = read_stored(folder)
        inner = config["dflash_config"]
        at = [each + 1 for each in inner["target_layer_ids"]]
        draft = cls(target, at, config["num_hidden_layers"], config["block_size"], inner["mask_token_id"])
        draft.load_state_dict(tensors)
        return draft

    def pick(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Return the anchors of a batch, drawn from all rows alike."""
        count = max(1, round(self.anchors * len(batch.rows)))
        return torch.randperm(len(batch.rows), generator=random)[:count].sort().values

    def states(self, batch: Batch, reading: Reading, picked: Tensor, count: int) -> list[Tensor]:
        """See `Draft.states`. All steps are one forward; `count` is at most the block without its anchor."""
        chat, slot, anchors = _placed(batch, picked)
        number, width = anchors.shape
        block, length = self.block, batch.tokens.shape[1]
        tokens = torch.full((number, width, block), self.mask, device=anchors.device)
        tokens[..., 0] = batch.tokens.gather(1, anchors)
        places = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
        rope = self.target.rope.table
        tables = rope[places.clamp_max(len(rope) - 1)][:, None], rope[:length]
        seen = _seen(anchors, block, length)
        context = self.hidden_norm(self.fc(torch.cat(reading.taps, -1)))
        x = F.embedding(tokens.flatten(1), self.target.embed_tokens.weight)
        for layer in self.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), context, tables, seen)  # type: ignore[operator]
            x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
        filled = self.norm(x.view(number, width, block, -1)[chat, slot])
        return [filled[:, 1 + step] for step in range(count)]

    def weights(self, count: int) -> list[float]:
        """Return exp(-s / g) for step s, the paper's equation 4, with g = 4 for blocks of 8, half as many."""
        return [math.exp(-2 * step / self.block) for step in range(count)]

    def stored(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors in the authors' spelling: a layer id k is the boundary k + 1."""
        first: Any = self.layers[0]
        config = sizes(self.target) | {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "num_hidden_layers": len(self.layers),
            "layer_types": ["full_attention"] * len(self.layers),
            "intermediate_size": first.mlp.down_proj.in_features,
            "num_target_layers": len(self.target.layers),
            "block_size": self.block,
            "dflash_config": {
                "mask_token_id": self.mask,
                "target_layer_ids": [int(each) - 1 for each in self.reads],
            },
        }
        return config, dict(self.named_parameters())

    @staticmethod
    def engine(steps: int) -> dict[str, Any]:
        """See `Draft.engine`."""
        return {"algorithm": "dflash", "config": {"num_draft_tokens": steps + 1}}


def _placed(batch: Batch, picked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each anchor's chat int64 [A] and its place among that chat's, and all positions int64 [B, most].

    Places that no anchor takes hold position 0.
    """
    number, length = batch.tokens.shape
    rows = batch.rows[picked]
    chat = rows // length
    counts = chat.bincount(minlength=number)
    slot = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[chat]
    anchors = rows.new_zeros(number, int(counts.max()))
    anchors[chat, slot] = rows % length + 1
    return chat, slot, anchors


def _seen(anchors: Tensor, block: int, length: int) -> Tensor:
    """Return bool [B, 1, N, L + N]: a row sees the tokens before its anchor, and all of its block."""
    number, width = anchors.shape
    before = torch.arange(length, device=anchors.device) < anchors[..., None]
    before = before.repeat_interleave(block, 1)
    block_of = torch.arange(width, device=anchors.device).repeat_interleave(block)
    own = block_of[:, None] == block_of
    return torch.cat((before, own.expand(number, -1, -1)), -1)[:, None]
