"""Lets the tests import what lies beside them; a target, and engines over it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import dflash_tiny as tiny
from safetensors.torch import load_file
from torch import Tensor

from specplug import Engine
from specplug.testing import Harness
from specplug.testing.targets import decoder_target


class Lab:
    """A two-layer target in `target`, and `soft`, which follows its last token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = folder / "target"
        self.loaded = decoder_target(3, 64, folder=self.target)
        self.model = self.loaded.model
        self.soft = tiny.softened(decoder_target(3, 64, folder=folder / "soft"))
        stored = load_file(str(self.target / "model.safetensors"))
        self.ends: dict[str, Tensor] = {
            "embed_tokens.weight": stored["model.embed_tokens.weight"],
            "lm_head.weight": stored["lm_head.weight"],
        }

    def engine(
        self, algorithm: str | None, draft: Path | None = None, config: Mapping[str, Any] | None = None, **options: Any
    ) -> Engine:
        """Return an engine on the target; no algorithm decodes plainly."""
        if algorithm is not None:
            options |= {"algorithm": algorithm, "config": config or {}, "speculative_draft_model_path": str(draft)}
        return Engine(options.pop("model", self.loaded), **{"page_size": 4, "context_length": 256, **options})

    def harness(self, algorithm: str, draft: Path, config: Mapping[str, Any] | None = None, slots: int = 4) -> Harness:
        """Return a drafter to drive by hand."""
        with self.engine(algorithm, draft, config) as engine:
            return Harness(engine.run, self.loaded, slots=slots)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))
