import json
from pathlib import Path

import torch

from specplug.testing import DrafterConformance

HEADS, LAYERS = 3, 1


class TestMedusa(DrafterConformance):
    algorithm = "medusa"
    config = {"num_draft_tokens": 8, "medusa_top_k": 3}

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        """Random heads, published as Medusa's are, and converted."""
        from specplug_medusa.convert import convert

        sizes = json.loads((target_dir / "config.json").read_text())
        hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for head in range(HEADS):
            for layer in range(LAYERS):
                weights[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden, generator=generator) / 8
                weights[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=generator) / 8
            weights[f"{head}.{LAYERS}.weight"] = torch.randn(vocab, hidden, generator=generator)
        published = out_dir / "published"
        published.mkdir()
        config = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": str(target_dir)}
        (published / "config.json").write_text(json.dumps(config))
        torch.save(weights, published / "medusa_lm_head.pt")
        convert(published, out_dir)
