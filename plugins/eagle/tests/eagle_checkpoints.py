"""Writers of tiny random heads, in every spelling that is published.

A head is first made in one spelling (`layers.0.`, no prefix) with a plain one-layer config; `official`, `modelopt`,
`speculators` and `prefixed` turn it into what their producers write. `write_eagle1` and `write_eagle3` do all of it
for a target on disk, as the kit's `make_draft` needs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """A head as its ``config.json`` and its tensors; `save` writes it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def but(self, config: Mapping[str, Any] | None = None, **tensors: Tensor | None) -> Head:
        """Return a copy with other config entries (None: without) and tensors (``__`` for a dot; None: without)."""
        changed = {**self.config, **(config or {})}
        stored = {**self.tensors, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
        return Head(
            {key: value for key, value in changed.items() if value is not None or key not in (config or {})},
            {name: tensor for name, tensor in stored.items() if tensor is not None},
        )

    def save(self, folder: Path, *, binary: bool = False) -> Path:
        """Write the folder, as ``model.safetensors`` or as ``pytorch_model.bin``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if binary:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(
                {name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors"
            )
        return folder


class _Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * (gain / math.sqrt(columns))

    def norm(self, size: int) -> Tensor:
        """A norm's weight that is not all ones: recycling before or after it can be told apart."""
        return 0.5 + torch.rand(size, generator=self.generator)

    def ids(self, count: int, vocab: int) -> Tensor:
        """`count` increasing ids with gaps of uneven size."""
        return torch.randperm(vocab, generator=self.generator)[:count].sort().values


def eagle3(
    target: Mapping[str, Any],
    seed: int = 0,
    *,
    rows: int | None = None,
    boundaries: Sequence[int] = (0, 1, 2),
    hidden: int | None = None,
    head_dim: int = 8,
    layers: int = 1,
    qk_norm: bool = False,
    attention_bias: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    use_aux: bool = True,
    ships_embed: bool = False,
    ships_head: bool = True,
    fc_bias: bool = False,
) -> Head:
    """Return an EAGLE-3 head for a target of this config, boundaries in top-level notation.

    `rows`: draft vocabulary (default three quarters of the target's; the target's own size: no maps);
    `hidden`: the head's own hidden size, embeddings shipped where it is not the target's.
    """
    random = _Random(seed)
    own, vocab, width = hidden or target["hidden_size"], target["vocab_size"], target["hidden_size"]
    rows = vocab * 3 // 4 if rows is None else rows
    heads, kv_heads, inner = 4, 2, 2 * own
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "vocab_size": vocab,
        "draft_vocab_size": rows,
        "hidden_size": own,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": list(boundaries),
    }
    config |= {"target_hidden_size": width} if own != width else {}
    config |= {"attention_bias": True} if attention_bias else {}
    config |= {"bias": True} if fc_bias else {}
    flags = {
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_output": norm_output,
        "norm_before_residual": norm_before_residual,
    }
    config |= {name: True for name, on in flags.items() if on}
    tensors: dict[str, Tensor] = {}
    if use_aux:
        wide = len(boundaries) * width
        tensors["fc.weight"] = random.matrix(own, wide)
        if fc_bias:
            tensors["fc.bias"] = random.matrix(1, own)[0]
        if norm_before_fc:
            tensors["input_norm.weight"] = random.norm(wide)
        if fc_norm:
            tensors |= {f"fc_norm.{part}.weight": random.norm(width) for part in range(len(boundaries))}
    else:
        config["eagle_config"] = {"use_aux_hidden_state": False}
        del config["eagle_aux_hidden_state_layer_ids"]
    for layer in range(layers):
        wide = own if layer else 2 * own
        tensors |= _layer(random, f"layers.{layer}.", own, wide, inner, heads, kv_heads, head_dim)
        at = f"layers.{layer}.self_attn."
        if qk_norm:
            tensors |= {f"{at}{part}_norm.weight": random.norm(head_dim) for part in "qk"}
        if attention_bias:
            sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": own}
            tensors |= {f"{at}{part}_proj.bias": random.matrix(1, size)[0] for part, size in sizes.items()}
    tensors["layers.0.hidden_norm.weight"] = random.norm(own)
    tensors["norm.weight"] = random.norm(own)
    if ships_head:
        tensors["lm_head.weight"] = random.matrix(rows, own, 2.0)
    if ships_embed or own != width:
        tensors["embed_tokens.weight"] = random.matrix(vocab, own, own**0.5)
    if rows < vocab:
        ids = random.ids(rows, vocab)
        tensors["d2t"] = ids - torch.arange(rows)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return Head(config, tensors)


def eagle1(
    target: Mapping[str, Any],
    seed: int = 0,
    *,
    layers: int = 1,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    ships_embed: bool = False,
) -> Head:
    """Return an EAGLE-1/2 head for a target of this config, as the authors write it: no norms, no output head."""
    random = _Random(seed)
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    heads, kv_heads, inner = 4, 2, 2 * hidden
    head_dim = hidden // heads
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    config |= {} if fc_bias else {"bias": False}  # an absent key means a bias
    config |= {"qkv_bias": True} if qkv_bias else {}
    tensors = {"fc.weight": random.matrix(hidden, 2 * hidden)}
    if fc_bias:
        tensors["fc.bias"] = random.matrix(1, hidden)[0]
    for layer in range(layers):
        at = f"layers.{layer}."
        tensors |= _layer(random, at, hidden, hidden, inner, heads, kv_heads, head_dim)
        if qkv_bias:
            sizes = {"q": hidden, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
            tensors |= {f"{at}self_attn.{part}_proj.bias": random.matrix(1, size)[0] for part, size in sizes.items()}
    del tensors["layers.0.input_layernorm.weight"]
    if ships_embed:
        tensors["embed_tokens.weight"] = random.matrix(vocab, hidden, hidden**0.5)
    return Head(config, tensors)


def _layer(
    random: _Random, at: str, hidden: int, wide: int, inner: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Tensor]:
    return {
        at + "input_layernorm.weight": random.norm(hidden),
        at + "self_attn.q_proj.weight": random.matrix(heads * head_dim, wide),
        at + "self_attn.k_proj.weight": random.matrix(kv_heads * head_dim, wide),
        at + "self_attn.v_proj.weight": random.matrix(kv_heads * head_dim, wide),
        at + "self_attn.o_proj.weight": random.matrix(hidden, heads * head_dim),
        at + "post_attention_layernorm.weight": random.norm(hidden),
        at + "mlp.gate_proj.weight": random.matrix(inner, hidden),
        at + "mlp.up_proj.weight": random.matrix(inner, hidden),
        at + "mlp.down_proj.weight": random.matrix(hidden, inner),
    }


# --- spellings -------------------------------------------------------------------------------------------------------


def official(head: Head) -> Head:
    """The authors' and SpecForge's names: the layer is ``midlayer``."""
    return replace(
        head, tensors={name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.tensors.items()}
    )


def modelopt(head: Head) -> Head:
    """ModelOpt's: ``layers.0.``, no t2d, ids nested and counted as outputs of layers, flags nested too."""
    config = dict(head.config)
    nested = dict(config.pop("eagle_config", {}))
    ids = config.pop("eagle_aux_hidden_state_layer_ids", None)
    if ids is not None:
        nested |= {"eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in ids], "use_aux_hidden_state": True}
    for flag in ("norm_before_fc",):
        if flag in config:
            nested[flag] = config.pop(flag)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
    return Head(config, {name: tensor for name, tensor in head.tensors.items() if name != "t2d"})


def speculators(head: Head, steps: int = 3) -> Head:
    """The speculators library's: the model's config nested, embeddings and output head always stored."""
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "fc_norm", "norm_before_fc")
    inner = {key: value for key, value in head.config.items() if not key.startswith("norm_") and key not in own}
    theta = inner.pop("rope_theta", 10000.0)
    inner["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": inner,
        **{key: head.config.get(key) for key in own},
        "norm_output": head.config.get("norm_output", False),
        "norm_before_residual": head.config.get("norm_before_residual", False),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
    return Head({key: value for key, value in config.items() if value is not None}, dict(head.tensors))


def prefixed(head: Head, prefix: str = "model.") -> Head:
    """Every tensor under one prefix, as some exports have it."""
    return replace(head, tensors={prefix + name: tensor for name, tensor in head.tensors.items()})


# --- for a target on disk --------------------------------------------------------------------------------------------


def write_eagle3(target_dir: Path, out_dir: Path, seed: int = 0, **options: Any) -> Path:
    """Write a head in the authors' spelling for the target in `target_dir`; `options` are `eagle3`'s."""
    return official(eagle3(_config(target_dir), seed, **options)).save(out_dir)


def write_eagle1(target_dir: Path, out_dir: Path, seed: int = 0, *, binary: bool = True, **options: Any) -> Path:
    """Write an EAGLE-1/2 head for the target in `target_dir`; `options` are `eagle1`'s."""
    return eagle1(_config(target_dir), seed, **options).save(out_dir, binary=binary)


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found
