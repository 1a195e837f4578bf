import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specplug.testing import DrafterConformance


class TestStandalone(DrafterConformance):
    algorithm = "standalone"

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        """The target with noise on its weights: a draft that is right often, and wrong often."""
        shutil.copytree(target_dir, out_dir, dirs_exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        weights = load_file(str(target_dir / "model.safetensors"))
        noisy = {
            name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1
            else tensor
            for name, tensor in weights.items()
        }
        save_file(noisy, str(out_dir / "model.safetensors"))


class TestSampled(TestStandalone):
    config = {"draft_sampling": True, "num_steps": 2}
