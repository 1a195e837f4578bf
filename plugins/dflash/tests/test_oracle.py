"""Drafts equal the definition's, for every layout, at every position, whatever was accepted and rejected before."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dflash_tiny as tiny
import pytest
import torch
from dflash_dense import Case, block_drafts
from torch import Tensor

from specplug.testing import Move

TEXT = torch.randint(0, 64, (125,), generator=torch.Generator().manual_seed(11)).tolist()
COUNTS = (1, 3, 2, 1, 2, 4, 1)
"""Tokens that steps commit, in turn: the anchor, and so many accepted drafts but one."""

Drafts = dict[str, Tensor]
DSPARK = {**tiny.body(), **tiny.ends()}
HALF = sorted(3 * at % 64 for at in range(40))
"""Target ids of a draft vocabulary."""
D2T = {"d2t": torch.tensor(HALF) - torch.arange(40), **tiny.body(), **tiny.ends(rows=40)}


def windowed(window: int, **changes: Any) -> dict[str, Any]:
    return tiny.zlab_config(layer_types=["sliding_attention", "full_attention"], sliding_window=window, **changes)


def biased() -> Drafts:
    parts = {"q": 32, "k": 16, "v": 16, "o": 32}
    random = tiny.Random(9)
    return tiny.body() | {
        f"layers.{layer}.self_attn.{part}_proj.bias": random.scale(size)
        for layer in range(2)
        for part, size in parts.items()
    }


def bare() -> Drafts:
    return {name: tensor for name, tensor in tiny.body().items() if "q_norm" not in name and "k_norm" not in name}


CASES: Mapping[str, tuple[str, dict[str, Any], Drafts, dict[str, Any]]] = {
    "z-lab": ("dflash", tiny.zlab_config(), tiny.body(), {}),
    "z-lab, sliding": ("dflash", windowed(7), tiny.body(), {"windows": (7, None), "causal": (True, False)}),
    "z-lab, sliding below the block": (
        "dflash",
        windowed(3),
        tiny.body(),
        {"windows": (3, None), "causal": (True, False)},
    ),
    "z-lab, sliding both ways": (
        "dflash",
        windowed(7, is_causal=False),
        tiny.body(),
        {"windows": (7, None)},
    ),
    "z-lab, causal": ("dflash", tiny.zlab_config(is_causal=True), tiny.body(), {"causal": (True, True)}),
    "z-lab, its own ends": ("dflash", tiny.zlab_config(), DSPARK, {}),
    "z-lab, biases": ("dflash", tiny.zlab_config(attention_bias=True), biased(), {}),
    "z-lab, no query and key norm": ("dflash", tiny.zlab_config(), bare(), {}),
    "z-lab, scaled embeddings": (
        "dflash",
        tiny.zlab_config(dflash_config={"input_embedding_scale": 0.5}),
        tiny.body(),
        {"scale": 0.5},
    ),
    "z-lab, one state": (
        "dflash",
        tiny.zlab_config(dflash_config={"target_layer_ids": [0]}),
        tiny.body(taps=1),
        {"boundaries": (1,)},
    ),
    "reduced vocabulary": ("dflash", tiny.zlab_config(draft_vocab_size=40), D2T, {"ids": HALF}),
    "next slot": ("dflash", tiny.dspark_config(rank=0), DSPARK, {"next_slot": True}),
    "speculators": (
        "dflash",
        tiny.speculators_config(
            "dflash",
            layers={"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
        ),
        tiny.body(),
        {"windows": (None, 7), "causal": (False, True)},
    ),
    "speculators, both ways, next slot": (
        "dflash",
        tiny.speculators_config(
            "dflash",
            layers={"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
            sliding_window_non_causal=True,
            sample_from_anchor=True,
        ),
        tiny.body(),
        {"windows": (None, 7), "next_slot": True},
    ),
    **{
        f"dspark, {kind}": (
            "dspark",
            tiny.dspark_config(kind),
            DSPARK | tiny.markov(kind),
            {"kind": kind, "next_slot": True},
        )
        for kind in ("vanilla", "gated", "rnn")
    },
    **{
        f"speculators dspark, same slot, {kind}": (
            "dspark",
            tiny.speculators_config("dspark", markov_rank=6, markov_head_type=kind, sample_from_anchor=False),
            tiny.body() | tiny.markov(kind),
            {"kind": kind},
        )
        for kind in ("vanilla", "rnn")
    },
    "speculators dspark, reduced vocabulary": (
        "dspark",
        tiny.speculators_config("dspark", markov_rank=6, draft_vocab_size=40),
        D2T | tiny.markov(rows=40),
        {"kind": "vanilla", "next_slot": True, "ids": HALF},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_definitions(lab: Any, name: str, tmp_path: Path) -> None:
    play(lab, name, {}, tmp_path, steps=50)


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("z-lab", True),
        ("reduced vocabulary", True),
        ("dspark, gated", False),
        ("speculators dspark, reduced vocabulary", False),
    ],
)
def test_greedy_rows_are_the_same_drawn_or_not(lab: Any, name: str, draws: bool, tmp_path: Path) -> None:
    play(lab, name, {"draft_sampling": draws}, tmp_path, steps=12)


def play(lab: Any, name: str, options: dict[str, Any], folder: Path, steps: int) -> None:
    """Compare with the definition after each of `steps` forwards over one text."""
    algorithm, config, weights, told = CASES[name]
    case = Case(weights, ends=lab.ends, **told)
    harness = lab.harness(algorithm, tiny.write(folder, config, weights), options)
    harness.admit(1, TEXT, 9)
    done = differing = 0
    for at in range(steps):
        count = 9 if at == 0 else COUNTS[at % len(COUNTS)]
        rejected = () if at == 0 else tuple(TEXT[at : at + max(0, harness.plan.nodes + 1 - count)])
        step = harness.ingest([Move(1, count, rejected)])
        done += count
        wanted = block_drafts(case, lab.model, TEXT[: done + 1])[0]
        found = harness.propose(step)[1][0]
        assert list(found) == wanted, f"step {at}, {done} tokens"
        differing += len(set(found)) - 1
    assert differing > steps // 5, "hardly a draft differs from its neighbours: this shows nothing"
