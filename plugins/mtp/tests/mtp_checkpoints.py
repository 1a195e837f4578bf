"""Tiny checkpoints with MTP heads, written as their families publish them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

HIDDEN = 32
LETTERS = tuple(range(ord("a"), ord("i")))
"""What targets with a tokenizer say."""


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(folder / "model.safetensors"))
    return folder


class Random:
    """Seeded weights: matrices that keep a state's size, norms around 1 that are not 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) * gain / columns**0.5

    def vector(self, size: int, mean: float = 1.0, spread: float = 0.3) -> Tensor:
        return mean + spread * torch.randn(size, generator=self._generator)


def decoder_block(random: Random, config: Mapping[str, Any], *, bias: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a Llama-family layer of `config`, named as in checkpoints."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found = {
        "input_layernorm.weight": random.vector(hidden),
        "post_attention_layernorm.weight": random.vector(hidden),
        "self_attn.q_proj.weight": random.matrix(queries, hidden),
        "self_attn.k_proj.weight": random.matrix(keys, hidden),
        "self_attn.v_proj.weight": random.matrix(keys, hidden),
        "self_attn.o_proj.weight": random.matrix(hidden, queries),
        "mlp.gate_proj.weight": random.matrix(inner, hidden),
        "mlp.up_proj.weight": random.matrix(inner, hidden),
        "mlp.down_proj.weight": random.matrix(hidden, inner),
    }
    if bias:
        found |= {
            "self_attn.q_proj.bias": random.vector(queries, 0.0),
            "self_attn.k_proj.bias": random.vector(keys, 0.0),
            "self_attn.v_proj.bias": random.vector(keys, 0.0),
        }
    return found


def fastmtp_head(random: Random, config: Mapping[str, Any], *, bias: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a head with MiMo's names, without their prefix."""
    hidden = config["hidden_size"]
    return {
        "token_layernorm.weight": random.vector(hidden),
        "hidden_layernorm.weight": random.vector(hidden),
        "input_proj.weight": random.matrix(hidden, 2 * hidden),
        "final_layernorm.weight": random.vector(hidden),
        **decoder_block(random, config, bias=bias),
    }


def mimo(folder: Path, *, heads: int = 1, text: bool = False, seed: int = 1) -> Path:
    """Write a MiMo target with `heads` MTP layers; `text`: with a tokenizer, saying letters."""
    vocab, alphabet = (SIZE, LETTERS) if text else (64, None)
    tokenizer = byte_tokenizer() if text else None
    decoder_target(seed, vocab, folder=folder, tokenizer=tokenizer, alphabet=alphabet)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": heads}
    weights = load_file(str(folder / "model.safetensors"))
    random = Random(seed)
    for layer in range(config["num_hidden_layers"]):
        block = decoder_block(random, config, bias=True)
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items() if name.endswith(".bias")}
    for head in range(heads):
        tensors = fastmtp_head(random, config, bias=True)
        weights |= {f"model.mtp_layers.{head}.{name}": tensor for name, tensor in tensors.items()}
    return save(folder, config, weights)


def speculators(target: Path, folder: Path, *, kind: str = "llama", seed: int = 2, tokens: int = 3) -> Path:
    """Write a speculators MTP draft for the decoder in `target`."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    inner = {key: value for key, value in config.items() if key != "architectures"} | {"model_type": kind}
    stated = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.5.0",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "target", "architectures": config["architectures"]},
        },
    }
    random = Random(seed)
    tensors = fastmtp_head(random, config, bias=kind == "qwen2")
    if kind == "qwen3":
        head = config["head_dim"]
        tensors |= {f"self_attn.{part}_norm.weight": random.vector(head) for part in "qk"}
    return save(folder, stated, {f"mtp_layers.0.{name}": tensor for name, tensor in tensors.items()})


GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def numbered(
    folder: Path, config: Mapping[str, Any], *, heads: int = 1, seed: int = 1, text: bool = False, dense: bool = False
) -> Path:
    """Write a target of transformers' with `heads` MTP layers after its own, as DeepSeek-V3 and GLM-4.5 store them.

    `text`: with a tokenizer, saying letters; `dense`: no layer has experts.
    """
    config = {**config, "num_nextn_predict_layers": heads} | ({"vocab_size": SIZE} if text else {})
    config |= {"first_k_dense_replace": 9} if dense else {}
    layers = config["num_hidden_layers"]
    random, weights = Random(seed), {}
    for name, shape in _numbered_shapes({**config, "num_hidden_layers": layers + heads}).items():
        if len(shape) > 1:
            weights[name] = random.matrix(*shape, gain=6.0 if name.startswith(("lm_head", "model.embed")) else 1.2)
        else:
            weights[name] = random.vector(*shape, mean=0.0 if name.endswith("bias") else 1.0)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    for head in range(layers, layers + heads):
        at = f"model.layers.{head}."
        weights |= {
            at + "enorm.weight": random.vector(hidden),
            at + "hnorm.weight": random.vector(hidden),
            at + "eh_proj.weight": random.matrix(hidden, 2 * hidden),
            at + "shared_head.norm.weight": random.vector(hidden),
            at + "embed_tokens.weight": torch.zeros(vocab, hidden),
            at + "shared_head.head.weight": torch.zeros(vocab, hidden),
        }
    if text:
        weights["lm_head.weight"][[token for token in range(SIZE) if token not in LETTERS]] = 0.0
        byte_tokenizer().save_pretrained(str(folder))
    return save(folder, config, weights)


def _numbered_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a whole model, experts one by one, as its family publishes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    named = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **named))
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            inner, hidden = tensor.shape[1] // 2, tensor.shape[2]
            for expert in range(len(tensor)):
                found |= {f"{stem}.{expert}.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        elif last == "down_proj" and tensor.dim() == 3:
            found |= {f"{stem}.{expert}.down_proj.weight": tuple(tensor.shape[1:]) for expert in range(len(tensor))}
        else:
            found[name] = tuple(tensor.shape)
    return found


QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
QWEN35 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "mtp_num_hidden_layers": 1,
    "text_config": {
        **{key: value for key, value in QWEN.items() if key not in ("architectures", "num_experts")},
        "model_type": "qwen3_5_text",
    },
}


def qwen_head(folder: Path, config: Mapping[str, Any], *, root: str = "mtp.", seed: int = 3, experts: int = 0) -> Path:
    """Write the head of a Qwen3-Next or Qwen3.5 target, with a dense MLP or `experts`, and nothing of the target's."""
    text, random = config.get("text_config", config), Random(seed)
    hidden, head = text["hidden_size"], text["head_dim"]
    block = decoder_block(random, text)
    block["self_attn.q_proj.weight"] = random.matrix(2 * text["num_attention_heads"] * head, hidden)
    block |= {f"self_attn.{part}_norm.weight": random.vector(head, 0.0) for part in "qk"}
    block |= {f"{name}_layernorm.weight": random.vector(hidden, 0.0) for name in ("input", "post_attention")}
    if experts:
        block = {name: tensor for name, tensor in block.items() if not name.startswith("mlp.")}
        inner = text["moe_intermediate_size"]
        for each in [*(f"experts.{number}" for number in range(experts)), "shared_expert"]:
            block |= {f"mlp.{each}.{part}_proj.weight": random.matrix(inner, hidden) for part in ("gate", "up")}
            block[f"mlp.{each}.down_proj.weight"] = random.matrix(hidden, inner)
        block["mlp.gate.weight"] = random.matrix(experts, hidden)
        block["mlp.shared_expert_gate.weight"] = random.matrix(1, hidden)
    tensors = {
        "fc.weight": random.matrix(hidden, 2 * hidden),
        "norm.weight": random.vector(hidden, 0.0),
        "pre_fc_norm_embedding.weight": random.vector(hidden, 0.0),
        "pre_fc_norm_hidden.weight": random.vector(hidden, 0.0),
        **{f"layers.0.{name}": tensor for name, tensor in block.items()},
    }
    return save(folder, config, {root + name: tensor for name, tensor in tensors.items()})
