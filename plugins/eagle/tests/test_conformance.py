"""The conformance kit, for both algorithms: chains, drawn chains and trees.

Most of it is `slow`: `test_oracle` and `test_drafter` have both heads draft chains and trees every time.
"""

from pathlib import Path

import pytest
from eagle_checkpoints import write_eagle1, write_eagle3

from specplug.testing import DrafterConformance


class TestEagle3Tree(DrafterConformance):
    algorithm = "eagle3"
    config = {"eagle_topk": 3, "num_steps": 3}

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        write_eagle3(target_dir, out_dir, seed)


class TestEagleDrawn(DrafterConformance):
    algorithm = "eagle"
    config = {"eagle_topk": 1, "num_steps": 2, "draft_sampling": True}

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        write_eagle1(target_dir, out_dir, seed)


@pytest.mark.slow
class TestEagle3(TestEagle3Tree):
    config = {"eagle_topk": 1}


@pytest.mark.slow
class TestEagle3Drawn(TestEagle3Tree):
    config = {"eagle_topk": 1, "num_steps": 2, "draft_sampling": True}


@pytest.mark.slow
class TestEagle(TestEagleDrawn):
    config = {"eagle_topk": 1}


@pytest.mark.slow
class TestEagleTree(TestEagleDrawn):
    config = {"eagle_topk": 2, "num_steps": 4}
