"""A tiny random target, and chats of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specplug import Engine
from specplug.models.decoder import Decoder
from specplug.models.weights import fill_dummy
from specplug.testing import targets
from specplug.testing.tokenizer import SIZE, byte_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

VOCAB, LAYERS = SIZE, 5


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of five layers, in float32."""
    folder = tmp_path_factory.mktemp("target")
    config = {**targets.decoder_config(VOCAB), "num_hidden_layers": LAYERS}
    made = Decoder(config)
    fill_dummy(made, 3)
    tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, weight in stored(made).items():
        wide = weight.dim() > 1
        drawn = torch.randn(weight.shape, generator=generator)
        tensors[name] = drawn * (weight.shape[-1] ** -0.5) if wide else 1 + 0.2 * drawn
        if "o_proj" in name:
            tensors[name] *= 0.1  # the last token says most of what comes next
    tensors["lm_head.weight"] *= 3.0
    # It says 48 of its tokens and no other.
    tensors["lm_head.weight"][:16] = tensors["lm_head.weight"][64:] = 0.0
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    byte_tokenizer().save_pretrained(str(folder))
    return folder


def stored(made: Decoder) -> dict[str, torch.Tensor]:
    """Every tensor of the decoder under its checkpoint name."""
    found: dict[str, torch.Tensor] = {}
    for name, module in made.named_modules():
        outer = "" if name.startswith("lm_head") else "model."
        parts = getattr(module, "part_tensors", None)
        if parts is not None:
            found |= {f"{outer}{name.rpartition('.')[0]}.{part}": weight for part, weight in parts()}
        else:
            found |= {f"{outer}{name}.{own}": weight for own, weight in module.named_parameters(recurse=False)}
    return found


@pytest.fixture(scope="session")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target says after random prompts, as a file of chats."""
    random = np.random.default_rng(0)
    prompts = [random.integers(16, 64, random.integers(3, 9)).tolist() for _ in range(160)]
    with Engine(str(model), dtype="float32", device="cpu") as engine:
        results = engine.generate(prompts, {"temperature": 0, "max_tokens": 24, "ignore_eos": True})
    whole = [prompt + list(result.ids) for prompt, result in zip(prompts, results, strict=True)]
    path = tmp_path_factory.mktemp("data") / "chats.npz"
    np.savez(
        path,
        tokens=np.concatenate(whole).astype(np.uint16),
        offsets=np.cumsum([0, *map(len, whole)]),
        prompt_len=np.array([len(prompt) for prompt in prompts], np.uint16),
        greedy=np.ones(len(prompts), bool),
    )
    return path
