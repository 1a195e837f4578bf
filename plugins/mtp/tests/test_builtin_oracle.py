"""Proposals are what the equations say, whatever led to the text: chunks, accepted drafts, rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import mimo, speculators
from mtp_oracle import TEXT, agree, decoder_head, head_by_head, one_head
from safetensors.torch import load_file

from specplug import Engine
from specplug.testing import Harness
from specplug.testing.setup import Target, stored_target
from specplug.testing.targets import decoder_target


def harness(target: Target, config: dict[str, Any], **options: Any) -> Harness:
    with Engine(target, algorithm="builtin-mtp", config=config, page_size=4, context_length=256, **options) as engine:
        return Harness(engine.run, target)


def tensors_of(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    stored = load_file(str(folder / "model.safetensors"))
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    folder = mimo(tmp_path_factory.mktemp("three") / "target", heads=3)
    return folder, stored_target(folder)


def heads_of(folder: Path) -> list[Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return [
        decoder_head(tensors_of(folder, f"model.mtp_layers.{at}."), config, embedding_first=False) for at in range(3)
    ]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_one_head_of_mimo(three: tuple[Path, Target], steps: int) -> None:
    """[h, e] order, and the state after the final norm goes round."""
    folder, target = three
    head = heads_of(folder)[0]
    agree(
        harness(target, {"num_steps": steps, "mtp_multi_layer": False}),
        lambda committed: one_head(target, head, TEXT, committed, steps),
    )


@pytest.mark.parametrize("reads", ["chain", "target"])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_head_for_each_step(three: tuple[Path, Target], steps: int, reads: str) -> None:
    folder, target = three
    heads = heads_of(folder)[:steps]
    agree(
        harness(target, {"num_steps": steps, "mtp_multi_layer": True, "mtp_depth_input": reads}),
        lambda committed: head_by_head(target, heads, TEXT, committed, chained=reads == "chain"),
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_speculators(tmp_path: Path, kind: str) -> None:
    """[e, h] order, a block of the kind that the draft's config names."""
    target = decoder_target(1, 64, folder=tmp_path / "target")
    draft = speculators(tmp_path / "target", tmp_path / "draft", kind=kind)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))["transformer_layer_config"]
    head = decoder_head(tensors_of(draft, "mtp_layers.0."), config, embedding_first=True)
    agree(
        harness(target, {}, speculative_draft_model_path=str(draft)),
        lambda committed: one_head(target, head, TEXT, committed, 3),
    )


def test_a_lower_depth_proposes_the_beginning(three: tuple[Path, Target]) -> None:
    for config in ({"mtp_multi_layer": True}, {"num_steps": 3, "mtp_multi_layer": False}):
        made = harness(three[1], config)
        step = made.play(0, TEXT, 12, [12])
        whole = made.propose(step)[0][0]
        assert len(whole) == 3
        for depth in (1, 2):
            step.depth = depth
            assert made.propose(step)[0][0] == whole[:depth]
