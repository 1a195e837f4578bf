"""Tiny draft checkpoints in every published layout, with seeded random float32 weights."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from dflash_dense import Case, block_states
from safetensors.torch import load_file, save_file
from torch import Tensor

from specplug.testing.targets import dense_forward

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 4, 2, 8, 48
VOCAB, LAYERS, BLOCK, MASK = 64, 2, 5, 63
IDS = [-1, 1]
"""Target layers whose outputs the draft reads, in the native notation: boundaries 0 and 2."""


def layer_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        **changes,
    }


def zlab_config(**changes: Any) -> dict[str, Any]:
    own = {"mask_token_id": MASK, "target_layer_ids": IDS} | changes.pop("dflash_config", {})
    return layer_config(
        **{"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "num_target_layers": 2, "dflash_config": own}
        | changes
    )


def dspark_config(kind: str = "vanilla", rank: int = 6, **changes: Any) -> dict[str, Any]:
    """DeepSeek's flat form."""
    return layer_config(
        **{
            "architectures": ["Qwen3DSparkModel"],
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "target_layer_ids": IDS,
            "num_target_layers": 2,
            "markov_rank": rank,
            "markov_head_type": kind,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        | changes
    )


def speculators_config(word: str, **changes: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": word,
        "architectures": [f"{'DFlash' if word == 'dflash' else 'DSpark'}DraftModel"],
        "transformer_layer_config": layer_config(**changes.pop("layers", {})),
        "draft_vocab_size": VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [each + 1 for each in IDS],
        "speculators_config": {"algorithm": word, "proposal_methods": [{"speculative_tokens": BLOCK - 1}]},
        **changes,
    }


class Random:
    """Seeded weights, scaled so that what comes out of each map is as spread as what goes in."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) * (gain / math.sqrt(columns))

    def scale(self, size: int) -> Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=self._generator)


def body(seed: int = 0, *, layers: int = LAYERS, taps: int = len(IDS), feature: int = HIDDEN) -> dict[str, Tensor]:
    """The z-lab tensors."""
    random = Random(seed)
    found = {
        "fc.weight": random.matrix(HIDDEN, taps * feature),
        "hidden_norm.weight": random.scale(HIDDEN),
        "norm.weight": random.scale(HIDDEN),
    }
    for layer in range(layers):
        at = f"layers.{layer}."
        found |= {
            at + "input_layernorm.weight": random.scale(HIDDEN),
            at + "self_attn.q_proj.weight": random.matrix(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": random.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": random.matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": random.matrix(HIDDEN, HEADS * HEAD_DIM, 6.0),
            at + "self_attn.q_norm.weight": 3.0 * random.scale(HEAD_DIM),  # so that rows attend to little, and differ
            at + "self_attn.k_norm.weight": random.scale(HEAD_DIM),
            at + "post_attention_layernorm.weight": random.scale(HIDDEN),
            at + "mlp.gate_proj.weight": random.matrix(INNER, HIDDEN),
            at + "mlp.up_proj.weight": random.matrix(INNER, HIDDEN),
            at + "mlp.down_proj.weight": random.matrix(HIDDEN, INNER),
        }
    return found


def ends(seed: int = 1, *, rows: int = VOCAB) -> dict[str, Tensor]:
    """Embedding and head of the draft's own."""
    random = Random(seed)
    return {
        "embed_tokens.weight": random.matrix(VOCAB, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": random.matrix(rows, HIDDEN, 2.0),
    }


def markov(kind: str = "vanilla", rank: int = 6, seed: int = 2, *, rows: int = VOCAB) -> dict[str, Tensor]:
    """Markov and confidence head, DeepSeek's names."""
    random = Random(seed)
    found = {
        "markov_head.markov_w1.weight": random.matrix(VOCAB, rank, rank**0.5),
        "markov_head.markov_w2.weight": random.matrix(rows, rank, 2.0),
        "confidence_head.proj.weight": random.matrix(1, HIDDEN + rank, 1.0),
        "confidence_head.proj.bias": torch.tensor([1.0]),
    }
    if kind == "gated":
        found["markov_head.gate_proj.weight"] = random.matrix(rank, HIDDEN + rank)
        found["markov_head.gate_proj.bias"] = random.scale(rank)
    if kind == "rnn":
        found["markov_head.joint_proj.weight"] = random.matrix(3 * rank, 2 * rank + HIDDEN)
        found["markov_head.joint_proj.bias"] = random.scale(3 * rank)
    return found


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(folder / "model.safetensors"))
    return folder


def softened(target: Any, factor: float = 0.2) -> Any:
    """Return the target, loaded from a folder, with layers that say little, there and in memory: what it says follows
    from the last token more often than not (0: always)."""
    file = Path(target.checkpoint.path) / "model.safetensors"
    weights = load_file(str(file))
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(factor)
            target.model.get_parameter(name.removeprefix("model.")).copy_(tensor)
    save_file(weights, str(file))
    return target


@torch.inference_mode()
def said_after(model: Any) -> Tensor:
    """Return the target's logits after each token alone, [V, V]."""
    return torch.cat([model.logits(dense_forward(model, [token])[0]) for token in range(model.vocab_size)]).clone()


def bigram_ends(model: Any, rows: int) -> dict[str, Tensor]:
    """Ends and heads of a draft that hardly looks at the text: what the target says after a token alone, written into
    a vanilla Markov head of full rank, over the first `rows` ids."""
    after = said_after(model)
    random = Random(3)
    return {
        "embed_tokens.weight": random.matrix(len(after), HIDDEN, HIDDEN**0.5),
        "lm_head.weight": random.matrix(rows, HIDDEN, 0.5),
        "markov_head.markov_w1.weight": torch.eye(len(after)),
        "markov_head.markov_w2.weight": after[:, :rows].T.contiguous(),
        "confidence_head.proj.weight": random.matrix(1, HIDDEN + len(after), 1.0),
        "confidence_head.proj.bias": torch.tensor([1.0]),
    }


@torch.inference_mode()
def fitted_head(model: Any, case: Case, prompts: Sequence[Sequence[int]], length: int = 24) -> dict[str, Tensor]:
    """Return the output head that, by least squares, makes a random same-slot draft say what the target says after
    `prompts`: a draft that is right often, and wrong often."""
    states, answers = [], []
    for prompt in prompts:
        text = list(prompt)
        while len(text) < len(prompt) + length + case.block:
            text.append(int(model.logits(dense_forward(model, text)[0][-1:]).argmax()))
        for end in range(len(prompt) + 1, len(prompt) + length):
            states.append(block_states(case, model, text[:end])[1:])
            answers += text[end : end + case.block - 1]
    x, wanted = torch.cat(states), torch.eye(model.vocab_size)[answers]
    square = x.T @ x + 1e-2 * torch.eye(x.shape[1])
    return {"lm_head.weight": torch.linalg.solve(square, x.T @ wanted).T.contiguous()}
