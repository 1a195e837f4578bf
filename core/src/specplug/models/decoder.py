"""One configurable decoder for the Llama family: Llama, Mistral, Qwen2, Qwen3 and their relatives."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from specplug.layers import DecoderLayer, Embedding, Linear, RMSNorm, Rotary, fused
from specplug.models.base import ForwardBatch, KVGeometry, TargetModel
from specplug.models.family import decoder_config

_PARTS = ("embed_tokens", "lm_head", "rope")


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
        self.rope = Rotary.of(sizes.rope, sizes.head_dim, self.max_position, device=device)
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
