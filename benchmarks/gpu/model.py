"""A dummy model of the Llama-3.1-8B shape whose answers go round in circles.

The weights are random and dense, so that a step costs what a real one does; only the embedding outweighs the
layers and the head is the embedding of the token before, so that token t is followed by the next of its circle.
Text that repeats is what an n-gram drafter needs to draft in every step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from specplug.models.target import Target

CIRCLE = 16
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the model's config.json, with `changes`, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **changes}))
    return folder


@torch.no_grad()
def go_round(target: Target) -> None:
    """Make the dummy `target` answer in circles of `CIRCLE` tokens."""
    embedding, head = target.model.part("embed_tokens").weight, target.model.part("lm_head").weight
    generator = torch.Generator(device=embedding.device).manual_seed(0)
    embedding.normal_(0, 64, generator=generator)  # what 32 layers add to it is small beside this
    token = torch.arange(len(embedding), device=embedding.device)
    before = torch.where(token % CIRCLE == 0, (token + CIRCLE - 1).clamp_max(len(embedding) - 1), token - 1)
    head.copy_(embedding[before] * (0.02 / 64))


def circling_prompt(length: int, row: int) -> list[int]:
    """Return a prompt of circle number `row`."""
    return [CIRCLE * (row + 1) + at % CIRCLE for at in range(length)]
