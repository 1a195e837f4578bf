"""Proposals against drafting by its description, whatever led to a text: chunks, acceptance, rejection, preemption."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head, eagle1, eagle3, official
from eagle_oracle import Drafts, Oracle

from specplug.testing import Harness, Move

TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5)
HEADS: Mapping[str, Mapping[str, Any]] = {
    "eagle": {},
    "eagle, fc bias": {"fc_bias": True},
    "eagle3": {},
    "eagle3, norm_output": {"norm_output": True},
    "eagle3, norm_before_residual": {"norm_before_residual": True},
    "eagle3, fc_norm, five states": {"fc_norm": True, "boundaries": (2, 0, 1, 2, 1)},
    "eagle3, norm_before_fc, full vocabulary": {"norm_before_fc": True, "rows": 64},
    "eagle3, final state": {"use_aux": False},
    "eagle3, its own width": {"hidden": 48},
    "eagle3, the target's output head": {"rows": 64, "ships_head": False},
}
CHAIN = {"eagle_topk": 1, "num_steps": 4}
TREE = {"eagle_topk": 3, "num_steps": 4, "num_draft_tokens": 14}


def head_of(models: Any, kind: str) -> tuple[str, Head]:
    algorithm = kind.split(",")[0]
    make = eagle1 if algorithm == "eagle" else eagle3
    return algorithm, make(models.loaded.model.config, 11, **HEADS[kind])


def both(models: Any, kind: str, config: Mapping[str, Any]) -> tuple[Harness, Oracle]:
    """Return a drafter of this kind to drive by hand, and its oracle."""
    algorithm, head = head_of(models, kind)
    folder: Path = models.folder / kind
    if not folder.exists():
        (official(head) if algorithm == "eagle3" else head).save(folder)
    with models.engine(folder, algorithm, config) as engine:
        harness = Harness(engine.run, models.loaded)
    return harness, Oracle(head, models.loaded, harness.plan.needs.taps)


def wanted(oracle: Oracle, config: Mapping[str, Any], count: int) -> Drafts:
    if config["eagle_topk"] == 1:
        return oracle.chain(TEXT, count, config["num_steps"])
    return oracle.tree(TEXT, count, config["num_steps"], config["eagle_topk"], config["num_draft_tokens"] - 1)


@pytest.mark.parametrize("kind", HEADS)
def test_chains(models: Any, kind: str) -> None:
    harness, oracle = both(models, kind, CHAIN)
    for count in (1, 2, 9, 24):
        assert harness.fresh(0, TEXT, count) == wanted(oracle, CHAIN, count)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3, norm_output", "eagle3, its own width"])
def test_trees(models: Any, kind: str) -> None:
    harness, oracle = both(models, kind, TREE)
    for count in (1, 10):
        assert harness.fresh(0, TEXT, count) == wanted(oracle, TREE, count)


@pytest.mark.parametrize("config", [CHAIN, TREE])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_any_history_leads_to_the_same(models: Any, kind: str, config: Mapping[str, Any]) -> None:
    """A prompt in chunks, rounds that drafted and accepted none, some, all; then the same again in another slot."""
    harness, oracle = both(models, kind, config)
    depth = harness.plan.depth
    for slot in (2, 0):
        harness.admit(slot, TEXT, 7)
        step = harness.ingest([Move(slot, 3)])
        assert harness.propose(step)[slot] == ((), ())  # the prompt is not finished
        step, count = harness.ingest([Move(slot, 4)]), 7
        for kept, rejected in ((1, 0), (2, 2), (1 + depth, 0), (1, depth), (1 + depth, 0), (3, 1)):
            assert harness.propose(step)[slot] == wanted(oracle, config, count)
            step = harness.ingest([Move(slot, kept, (63, 62, 61, 60, 59)[:rejected])])
            count += kept
        assert harness.propose(step)[slot] == wanted(oracle, config, count)
        harness.release(slot, "preempted")


@pytest.mark.parametrize("config", [CHAIN, TREE])
def test_the_cache_is_the_targets_after_every_round(models: Any, config: Mapping[str, Any]) -> None:
    """Rows below the root's hold exactly what one pass over the whole text writes, recycled rows never stay."""
    harness, _ = both(models, "eagle3", config)
    harness.admit(0, TEXT, 5)
    step = harness.ingest([Move(0, 5)])
    for kept, rejected in ((1, 2), (1 + harness.plan.depth, 0), (2, 1), (1 + harness.plan.depth, 0)):
        harness.propose(step)
        step = harness.ingest([Move(0, kept, (63, 62)[:rejected])])
    harness.propose(step)
    count = int(step.kv_len[0])
    fresh, _ = both(models, "eagle3", config)
    fresh.play(0, TEXT, count, [count])
    for found, right in zip(kv_rows(harness, count), kv_rows(fresh, count), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def kv_rows(harness: Harness, count: int) -> list[torch.Tensor]:
    view: Any = harness.arena.draft_kv()
    rows = torch.from_numpy(harness._pages.rows(0, 0, count))
    return [pool[0][rows].clone() for pool in (view._pool.k, view._pool.v)]


@pytest.mark.parametrize("config", [CHAIN, TREE])
def test_less_depth_is_the_same_method_with_fewer_levels(models: Any, config: Mapping[str, Any]) -> None:
    harness, oracle = both(models, "eagle3", config)
    harness.admit(0, TEXT, 9)
    step = harness.ingest([Move(0, 9)])
    for depth in (1, 2, 3):
        step.depth = depth
        assert harness.propose(step)[0] == wanted(oracle, {**config, "num_steps": depth}, 9)
    assert harness.propose(harness.ingest([Move(0, 2)]))[0] == wanted(oracle, config, 11)


def test_a_limit_leaves_the_best_nodes(models: Any) -> None:
    """The nodes come best first: what a limit leaves is the best tree of that size."""
    harness, oracle = both(models, "eagle3", TREE)
    harness.admit(0, TEXT, 9)
    step = harness.ingest([Move(0, 9)])
    for limit in (1, 4, 13):
        found = harness.propose(step, {0: limit})[0]
        assert found == oracle.tree(TEXT, 9, 4, 3, limit)
