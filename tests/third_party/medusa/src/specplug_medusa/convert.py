"""From ``medusa_lm_head.pt``, as heads are published, to what specplug reads: the same names in safetensors."""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def convert(folder: Path, out: Path) -> None:
    """Write `folder`'s config and heads into `out`. Raises FileNotFoundError where either is missing."""
    weights = torch.load(folder / "medusa_lm_head.pt", map_location="cpu", weights_only=True)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "config.json", out / "config.json")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(out / "model.safetensors"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m specplug_medusa.convert FOLDER OUT")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
