"""Tiny random Gemma 4 targets and assistants on disk, as transformers writes them."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)
from transformers.utils import logging

from specplug import Engine
from specplug.testing.setup import Target, read_checkpoint, stored_target

SLIDING, FULL = "sliding_attention", "full_attention"
TEXT: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 64,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SHARED: Mapping[str, Any] = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "num_hidden_layers": 5}
"""As the smaller Gemma 4: the last layers share KV, and every layer has an input of its own."""
K_EQ_V: Mapping[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""As the larger Gemma 4: values of full layers are made of their keys."""


@contextlib.contextmanager
def quiet() -> Any:
    """Without transformers' progress bars, which other tests would see in captured output."""
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def seeded(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Make every weight seeded and far from what it is initialised to, norms and scalars included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("norm.weight", "layer_scalar")) or "layernorm" in name:
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
            elif name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor), generator=generator))
            elif name.endswith("weight"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 1.2 / tensor.shape[-1] ** 0.5)
    return model.eval()


def write_target(folder: Path, seed: int = 0, *, alphabet: Sequence[int] | None = None, **changes: Any) -> Path:
    """Write a Gemma 4 text model. Tokens outside `alphabet` get logit 0, which greedy decoding all but never picks."""
    stated = {**TEXT, **changes}
    stated["layer_types"] = [*stated["layer_types"], FULL][: stated["num_hidden_layers"]]
    with quiet():
        model = seeded(Gemma4ForCausalLM(Gemma4TextConfig(**stated, tie_word_embeddings=alphabet is None)), seed)
        if alphabet is not None:
            others = [token for token in range(stated["vocab_size"]) if token not in alphabet]
            with torch.no_grad():
                model.lm_head.weight[others] = 0.0
        model.save_pretrained(folder)
    return folder


def write_multimodal_target(folder: Path, seed: int = 0) -> Path:
    """Write a Gemma 4 as it is published: the text model in one with what looks at pictures."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma4Config(
        text_config=dict(TEXT),
        vision_config={**vision, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        audio_config=None,
        **{f"{kind}_token_id": 63 - at for at, kind in enumerate(("image", "video", "audio", "boi", "eoi"))},
    )
    with quiet():
        seeded(Gemma4ForConditionalGeneration(config), seed).save_pretrained(folder)
    return folder


def write_assistant(
    folder: Path,
    target: Path,
    seed: int = 1,
    *,
    ordered: bool = False,
    said: Sequence[int] | None = None,
    **changes: Any,
) -> Path:
    """Write an assistant for the target in `target`: three sliding layers and a full one.

    Tokens outside `said` get logit 0, where that is given.
    """
    config = read_checkpoint(str(target)).config
    theirs = config.get("text_config", config)
    text = {
        **TEXT,
        "vocab_size": theirs["vocab_size"],
        "vocab_size_per_layer_input": 0,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 4,
        "sliding_window": theirs["sliding_window"],
        **changes,
    }
    stated = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=theirs["hidden_size"],
        use_ordered_embeddings=ordered,
        num_centroids=theirs["vocab_size"] // 4,
        centroid_intermediate_top_k=3,
    )
    with quiet():
        model = seeded(Gemma4AssistantForCausalLM(stated), seed)
        if said is not None:
            others = [token for token in range(theirs["vocab_size"]) if token not in said]
            with torch.no_grad():
                model.model.embed_tokens.weight[others] = 0.0
        model.save_pretrained(folder)
    return folder


def theirs(folder: Path) -> Any:
    """Load the model in `folder` by transformers, in float32."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def loaded(folder: Path) -> Target:
    """Load the target in `folder` as the engine does."""
    return stored_target(folder)


def engine(target: Target, draft: Path | None, config: Mapping[str, Any] | None = None, **options: Any) -> Engine:
    """Return an engine on `target`; `draft` None decodes plainly."""
    if draft is not None:
        options |= {"algorithm": "frozen-kv-mtp", "config": config or {}, "speculative_draft_model_path": str(draft)}
    return Engine(target, **{"page_size": 4, "context_length": 256, **options})
