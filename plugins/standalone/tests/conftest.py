"""Tiny models on disk, and engines over them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specplug import Engine
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Models:
    """A two-layer target in `target`, and drafts made from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.target = folder / "target"
        self.loaded = decoder_target(3, 64, folder=self.target)

    def draft(self, name: str, change: Change | None = None, config: Mapping[str, Any] | None = None) -> Path:
        """Copy the target under `name`, with other weights and config where given."""
        return copied(self.target, self._folder / name, change, config)

    def noisy(self, amount: float = 0.15) -> Path:
        """The target with noise on its weights: right often, and wrong often."""

        def change(weights: dict[str, Tensor]) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(5)
            return {
                name: tensor + amount * tensor.std() * torch.randn(tensor.shape, generator=generator)
                if tensor.dim() > 1
                else tensor
                for name, tensor in weights.items()
            }

        return self.draft(f"noisy-{amount}", change)

    def engine(self, draft: Path | None, config: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        """Return an engine on the target; `draft` None decodes plainly."""
        if draft is not None:
            options |= {"algorithm": "standalone", "config": config or {}, "speculative_draft_model_path": str(draft)}
        return Engine(self.loaded, **{"page_size": 4, "context_length": 256, **options})


def copied(source: Path, to: Path, change: Change | None = None, config: Mapping[str, Any] | None = None) -> Path:
    """Copy the model in `source`, with other weights and config where given."""
    if not to.exists():
        shutil.copytree(source, to)
        if change is not None:
            save_file(change(load_file(str(source / "model.safetensors"))), str(to / "model.safetensors"))
        stated = json.loads((to / "config.json").read_text(encoding="utf-8"))
        (to / "config.json").write_text(json.dumps({**stated, **(config or {})}), encoding="utf-8")
    return to


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Swapped:
    """Target and draft that are one model, but that the draft's tokenizer has two ids swapped."""

    def __init__(self, folder: Path) -> None:
        self.swap = (ord("a"), ord("b"))
        self.target, self.draft = folder / "target", folder / "draft"
        self.loaded = decoder_target(3, SIZE, folder=self.target, tokenizer=byte_tokenizer(), alphabet=range(97, 105))

        def change(weights: dict[str, Tensor]) -> dict[str, Tensor]:
            order = list(range(SIZE))
            order[self.swap[0]], order[self.swap[1]] = self.swap[1], self.swap[0]
            rows = ("model.embed_tokens.weight", "lm_head.weight")
            return {name: (tensor[order].contiguous() if name in rows else tensor) for name, tensor in weights.items()}

        copied(self.target, self.draft, change)
        byte_tokenizer(self.swap).save_pretrained(str(self.draft))


@pytest.fixture(scope="session")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Swapped:
    return Swapped(tmp_path_factory.mktemp("swapped"))
