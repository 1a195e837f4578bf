"""What a head's block keeps and reads, from its ``config.json`` alone. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specplug import DecoderConfig, KVLayers, UserError, decoder_sizes
from specplug_mtp.builtin_layout import Layout


def decoder_block(layout: Layout) -> DecoderConfig:
    """Return the sizes of a Llama-family block; what such a block would not compute is a `UserError`."""
    name = "the MTP draft" if layout.which == "draft" else "the target"
    sizes = decoder_sizes(layout.config, like=layout.like, name=name)
    if len(set(sizes.windows)) > 1:
        raise UserError(f"{name}: some layers have a sliding window, and nothing tells whether its MTP layer has")
    return sizes


def kv_of(layout: Layout) -> KVLayers:
    """Return the KV that one head keeps; a size that is missing is a `UserError`."""
    config = layout.config
    if layout.block == "decoder":
        sizes = decoder_block(layout)
        return KVLayers(
            layers=1, kv_heads=sizes.kv_heads, k_dim=sizes.head_dim, v_dim=sizes.head_dim, window=sizes.windows[0]
        )
    heads = size(config, "num_attention_heads")
    if layout.block == "deepseek_v3":
        # K and V are kept expanded, one of each for every head.
        k_dim = size(config, "qk_nope_head_dim") + size(config, "qk_rope_head_dim")
        return KVLayers(layers=1, kv_heads=heads, k_dim=k_dim, v_dim=size(config, "v_head_dim"))
    head = size(config, "head_dim", 256 if layout.block == "qwen" else size(config, "hidden_size") // heads)
    return KVLayers(layers=1, kv_heads=size(config, "num_key_value_heads", heads), k_dim=head, v_dim=head)


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number of a config; one that is missing or below 1 is a `UserError` that names the key."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise UserError(f"the config.json with the MTP layers has {key} = {value!r}; a whole number above 0 is needed")
    return value
