"""One configurable decoder for the Llama family: Llama, Mistral, Qwen2, Qwen3 and their relatives."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from specplug.layers import Angles, Embedding, FusedLinear, GatedMLP, Linear, RMSNorm, Rotary, RotaryScaling, fused
from specplug.models.base import AttentionStep, ForwardBatch, KVGeometry, TargetModel
from specplug.models.family import DecoderConfig, Rope, decoder_config

_PARTS = ("embed_tokens", "lm_head", "rope")


class SelfAttention(nn.Module):
    """Projections, optional query/key norm and rotary embedding around the attention of `layer`."""

    def __init__(self, layer: int, sizes: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv = FusedLinear(
            sizes.hidden_size,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=sizes.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(queries, sizes.hidden_size, bias=sizes.o_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if sizes.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, sizes.norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, sizes.norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, angles: Angles, attention: AttentionStep) -> Tensor:
        """Return [T, H] for `x` [T, H]; `angles` are `Rotary`'s for the step."""
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
        self.self_attn = SelfAttention(layer, sizes, dtype=dtype, device=device)
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


class Decoder(TargetModel):
    """A Llama-family model, its weights uninitialised until `specplug.models.weights.fill_module`.

    Modules are named as in the checkpoints, without the leading ``model.``. `max_position` (default:
    the config's) bounds the positions it can be run at and sizes the rotary table.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_position: int | None = None,
    ) -> None:
        super().__init__()
        sizes = decoder_config(config)
        self.config = dict(config)
        self.vocab_size, self.hidden_size = sizes.vocab_size, sizes.hidden_size
        self.max_position = sizes.max_position if max_position is None else max_position
        self.kv_layers = tuple(
            KVGeometry(sizes.kv_heads, sizes.head_dim, sizes.head_dim, window, sizes.heads) for window in sizes.windows
        )
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, sizes, dtype=dtype, device=device) for layer in range(len(sizes.windows))
        )
        self.norm = RMSNorm(sizes.hidden_size, sizes.norm_eps, dtype=dtype, device=device)
        self.rope = Rotary(sizes.head_dim, self.max_position, sizes.rope.theta, _scaling(sizes.rope), device=device)
        if sizes.tied:
            # Born without storage of its own, it takes the embedding's.
            self.lm_head = Linear(sizes.hidden_size, sizes.vocab_size, dtype=dtype, device="meta")
            self.lm_head.weight = self.embed_tokens.weight
        else:
            self.lm_head = Linear(sizes.hidden_size, sizes.vocab_size, dtype=dtype, device=device)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states after the final norm [T, H] and ``batch.taps`` in their order, [T, H] each.

        A tap of a boundary that the model does not have is a ValueError.
        """
        wanted = {tap.at for tap in batch.taps}
        at: dict[int | str, Tensor] = {}
        x, residual = self.embed_tokens(batch.tokens), None
        angles = self.rope.angles(batch.positions, x.dtype)
        for boundary, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            x, residual = layer.enter(x, residual)
            if boundary in wanted:
                # The fused kernels go on in place.
                at[boundary] = residual.clone() if fused.fits(residual) else residual
            x, residual = layer(x, residual, angles, batch.attention)
        final, at[len(self.layers)] = self.norm.add(x, residual)
        at["final_norm"] = final
        if not wanted <= at.keys():
            unknown = sorted(map(str, wanted - at.keys()))
            raise ValueError(f"taps {unknown}: this model has the boundaries 0 to {len(self.layers)} and 'final_norm'")
        return final, tuple(at[tap.at] for tap in batch.taps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 [*, V] for `hidden` [*, H], states after the final norm; in `out` where given."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float() if out is None else out.copy_(logits)

    def part(self, name: str) -> nn.Module:
        """Return ``embed_tokens`` (`Embedding`), ``lm_head`` (`Linear`) or ``rope`` (`Rotary`), shared."""
        if name not in _PARTS:
            raise KeyError(f"{name!r}: a target lends {', '.join(_PARTS)}")
        return self.get_submodule(name)


def stored_name(name: str) -> str | None:
    """Translate a checkpoint's tensor name into `Decoder`'s; None for what is computed and not loaded."""
    return None if name.endswith("rotary_emb.inv_freq") else name.removeprefix("model.")


def _scaling(rope: Rope) -> RotaryScaling | None:
    if rope.kind == "linear":
        return RotaryScaling("linear", rope.factor)
    if rope.kind == "llama3":
        return RotaryScaling(
            "llama3", rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
        )
    return None
