from pathlib import Path
from typing import ClassVar

import frozen_checkpoints as gemma
import pytest

from specplug.testing import DrafterConformance
from specplug.testing.bench import LETTERS, Kind
from specplug.testing.setup import Target
from specplug.testing.tokenizer import byte_tokenizer

LAYERS = {"num_hidden_layers": 2, "layer_types": [gemma.SLIDING, gemma.FULL]}
VOCAB = 260
"""The byte tokenizer's, padded to whole clusters."""


class TestFrozenKV(DrafterConformance):
    """Values made of keys, and windows shorter than the texts, as in larger Gemma 4; a head of clusters, drawn."""

    algorithm = "frozen-kv-mtp"
    config: ClassVar[dict[str, object]] = {"draft_sampling": True, "num_steps": 3}
    ordered = True

    def make_target(self, kind: Kind, folder: Path) -> Target:
        """A target whose layers differ in heads, head dim and window."""
        if kind == "text":
            gemma.write_target(folder, 1, vocab_size=VOCAB, alphabet=LETTERS, sliding_window=6, **LAYERS)
            byte_tokenizer().save_pretrained(str(folder))
        else:
            gemma.write_target(folder, 1, sliding_window=6, **gemma.K_EQ_V, **LAYERS)
        return gemma.loaded(folder)

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        """A random assistant: right by chance."""
        gemma.write_assistant(out_dir, target_dir, seed, ordered=self.ordered, num_kv_shared_layers=2, **LAYERS)


@pytest.mark.slow
class TestWholeHead(TestFrozenKV):
    """The likeliest of the whole vocabulary."""

    config: ClassVar[dict[str, object]] = {}
    ordered = False
