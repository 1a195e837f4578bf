from pathlib import Path

import pytest
from mtp_checkpoints import DEEPSEEK, GLM, mimo, numbered, speculators

from specplug.testing import DrafterConformance
from specplug.testing.setup import Target, stored_target


@pytest.mark.slow
class TestOneHead(DrafterConformance):
    """The head of a MiMo target drafts every step."""

    algorithm = "builtin-mtp"

    def make_target(self, kind: str, folder: Path) -> Target:
        return stored_target(mimo(folder, text=kind == "text"))


class TestHeadForEachStep(DrafterConformance):
    """Two heads; `test_builtin_oracle` has three every time, and so has the next class."""

    algorithm = "builtin-mtp"
    heads = 2
    config = {"mtp_multi_layer": True, "num_steps": heads, "draft_sampling": True}

    def make_target(self, kind: str, folder: Path) -> Target:
        return stored_target(mimo(folder, heads=self.heads, text=kind == "text"))


@pytest.mark.slow
class TestThreeHeads(TestHeadForEachStep):
    heads = 3
    config = {"mtp_multi_layer": True, "num_steps": heads, "draft_sampling": True}


class TestSpeculators(DrafterConformance):
    """A head in a folder of its own, for a Llama target."""

    algorithm = "builtin-mtp"
    config = {"num_steps": 2}

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        speculators(target_dir, out_dir, seed=seed)


@pytest.mark.slow
class TestGlm(DrafterConformance):
    """GLM-4.5: partial rotary embedding, experts, a head for each step."""

    algorithm = "builtin-mtp"
    config = {"mtp_multi_layer": True, "num_steps": 2}

    def make_target(self, kind: str, folder: Path) -> Target:
        return stored_target(numbered(folder, GLM, heads=2, text=kind == "text"))


@pytest.mark.slow
class TestDeepSeek(DrafterConformance):
    """DeepSeek-V3: latent attention, experts in groups; one head drafts every step."""

    algorithm = "builtin-mtp"
    config = {"num_steps": 2}

    def make_target(self, kind: str, folder: Path) -> Target:
        return stored_target(numbered(folder, DEEPSEEK, text=kind == "text"))
