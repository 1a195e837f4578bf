"""The kit on the scripted drafters: every one that keeps the contract passes every check."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specplug.models.target import Target
from specplug.sampling import SamplingParams
from specplug.testing.bench import LETTERS, PROMPTS, Bench, Kind
from specplug.testing.conformance import DrafterConformance
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target, table_target


class Scripted(DrafterConformance):
    __test__ = False
    behaviour = "right"
    tokens = 6

    def search_path(self, folder: Path) -> Sequence[str]:
        bench_registry(folder)
        return [str(folder)]

    def make_config(self, bench: Bench, kind: Kind) -> Mapping[str, Any]:
        prompts = PROMPTS if kind == "ids" else [[LETTERS[token] for token in prompt] for prompt in PROMPTS]
        sampling = SamplingParams(temperature=0.0, max_tokens=26)
        texts = [(*prompt, *bench.expected(prompt, sampling, kind).ids) for prompt in prompts]
        return {"scripted_texts": texts, "scripted_behaviour": self.behaviour, "num_draft_tokens": self.tokens}


class TestHostTree(Scripted):
    __test__ = True
    algorithm = "scripted"
    behaviour = "random_tree"


class TestDeviceRaggedOnADecoder(Scripted):
    __test__ = True
    algorithm = "scripted-device"
    behaviour = "ragged"

    def make_target(self, kind: Kind, folder: Path) -> Target:
        return decoder_target(3) if kind == "ids" else super().make_target(kind, folder)


class TestDense(Scripted):
    __test__ = True
    algorithm = "scripted-dense"

    def make_config(self, bench: Bench, kind: Kind) -> Mapping[str, Any]:
        return {"num_draft_tokens": 4, "scripted_seed": 0}

    def make_target(self, kind: Kind, folder: Path) -> Target:
        # Eight tokens, so that drafts drawn from another table are accepted often enough to matter.
        return table_target(8, 1, 0) if kind == "ids" else super().make_target(kind, folder)
