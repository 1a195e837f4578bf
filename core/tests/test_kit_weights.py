"""The kit on a drafter with weights: a draft checkpoint, taps of the target, per-slot state, a borrowed head."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specplug import AlgorithmSpec, Capabilities, Drafter, DraftPlan, Refusal, SpecConfig, TapRequest, hookimpl
from specplug.testing.conformance import DrafterConformance
from specplug.testing.registry import write_distribution

NEEDS = Capabilities(taps=(TapRequest(at="final_norm"),), borrows=frozenset({"lm_head", "embed_tokens"}))


def plan(config: Any, facts: Any, depth: int | None) -> DraftPlan | Refusal:
    if facts.draft is None or "hidden_size" not in facts.draft.config:
        return Refusal(reason="needs a draft checkpoint that names its hidden_size")
    nodes = (config.num_draft_tokens or 3) - 1
    nodes = nodes if depth is None else min(nodes, depth)
    return DraftPlan(needs=NEEDS, nodes=nodes, depth=nodes, bytes_per_slot=4 * facts.draft.config["hidden_size"])


class TapHead(Drafter):
    """Adds the embedding of the last token to the target's last hidden state, mixes, and reads the target's head."""

    def load(self, target: Any) -> None:
        hidden = self.ctx.facts.draft.config["hidden_size"]  # type: ignore[union-attr]
        self.mix = nn.Linear(hidden, hidden, bias=False)
        self.ctx.load(self.mix, "draft", lambda name: name.removeprefix("mix."))
        self.head, self.embed = target.borrow("lm_head"), target.borrow("embed_tokens")

    def allocate(self, arena: Any) -> None:
        self.state = arena.per_slot("state", (self.mix.in_features,), torch.float32)

    def ingest(self, step: Any) -> None:
        self.state[step.slots] = step.taps[0][step.row_start[:-1] + step.num_kept - 1]

    def propose(self, step: Any, out: Any) -> None:
        state, token = self.state[step.slots], step.root
        for node in range(self.plan.nodes):
            state = torch.tanh(self.mix(state) + self.embed(token))
            token = self.head(state).argmax(-1)
            out.tokens[step.slots, node] = token
        out.num_valid[step.slots] = out.limit[step.slots]


SPEC = AlgorithmSpec(
    name="taphead",
    api=(1, 0),
    summary="for the kit's own tests",
    capabilities=NEEDS,
    config_model=type("Described", (SpecConfig,), {"__doc__": "Only the shared option."}),
    plan=plan,
    drafter=f"{__name__}:TapHead",
)


def specplug_algorithms() -> Sequence[AlgorithmSpec]:
    return (SPEC,)


MANIFEST = ModuleType("kit_weights_manifest")
MANIFEST.specplug_algorithms = hookimpl(specplug_algorithms)  # type: ignore[attr-defined]


class TestTapHead(DrafterConformance):
    algorithm = "taphead"
    config = {"num_draft_tokens": 4}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _importable(self) -> Iterator[None]:
        with patch.dict(sys.modules, {MANIFEST.__name__: MANIFEST, __name__: sys.modules[__name__]}):
            yield

    def search_path(self, folder: Path) -> Sequence[str]:
        write_distribution(folder, "specplug-taphead", {"taphead": MANIFEST.__name__}, requires=("specplug>=0.1,<1",))
        (folder / f"{MANIFEST.__name__}.py").write_text("", encoding="utf-8")
        return [str(folder)]

    def make_draft(self, target_dir: Path, out_dir: Path, seed: int) -> None:
        hidden = json.loads((target_dir / "config.json").read_text())["hidden_size"]
        (out_dir / "config.json").write_text(json.dumps({"hidden_size": hidden}))
        weight = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(seed)) * hidden**-0.5
        save_file({"mix.weight": weight}, str(out_dir / "model.safetensors"))
