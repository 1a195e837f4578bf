import json
from pathlib import Path

import torch

from specplug.testing import DrafterConformance

HEADS, LAYERS = 3, 1


class TestMedusa(DrafterConformance):
    algorithm = "medusa"
    config = {"num_draft_tokens": 8, "medusa_top_k": 3}

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        """Random heads, stored as Medusa's are published."""
        sizes = json.loads((target_dir / "config.json").read_text())
        hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for head in range(HEADS):
            for layer in range(LAYERS):
                weights[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden, generator=generator) / 8
                weights[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=generator) / 8
            weights[f"{head}.{LAYERS}.weight"] = torch.randn(vocab, hidden, generator=generator)
        config = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": str(target_dir)}
        (out_dir / "config.json").write_text(json.dumps(config))
        torch.save(weights, out_dir / "medusa_lm_head.pt")
