from pathlib import Path
from typing import Any

import dflash_tiny as tiny
import torch
from dflash_dense import Case

from specplug.testing import DrafterConformance
from specplug.testing.bench import LETTERS, PROMPTS, Kind


class Softened(DrafterConformance):
    def make_target(self, kind: Kind, folder: Path) -> Any:
        """A target that follows its last token, so that tiny drafts are right often, and wrong often."""
        target = tiny.softened(super().make_target(kind, folder))
        self.models = {**getattr(self, "models", {}), target.checkpoint.path: target.model}
        return target


class TestDFlash(Softened):
    """A sliding and a full layer; the embedding is the target's."""

    algorithm = "dflash"

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        model, weights = self.models[str(target_dir)], tiny.body(seed)
        ends = {"embed_tokens.weight": model.embed_tokens.weight}
        case = Case(weights, windows=(9, None), causal=(True, False), ends=ends)
        letters = tuple(tuple(LETTERS[token] for token in prompt) for prompt in PROMPTS)
        weights |= tiny.fitted_head(model, case, PROMPTS if model.vocab_size < 100 else letters)
        windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
        tiny.write(out_dir, tiny.zlab_config(vocab_size=model.vocab_size, **windows), weights)


class TestDSpark(Softened):
    """Drafts are drawn and cut by their confidence; the draft has a vocabulary and ends of its own, and knows what the
    target says after one token."""

    algorithm = "dspark"
    config = {"dspark_confidence_threshold": 0.3}

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        model = self.models[str(target_dir)]
        vocab, rows = model.vocab_size, model.vocab_size - 1
        weights = tiny.body(seed) | tiny.bigram_ends(model, rows) | {"d2t": torch.zeros(rows, dtype=torch.int64)}
        tiny.write(out_dir, tiny.dspark_config("vanilla", vocab, vocab_size=vocab, draft_vocab_size=rows), weights)
