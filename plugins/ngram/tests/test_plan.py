"""The manifest: options, plans and refusals."""

import itertools
import subprocess
import sys

import pytest
from pydantic import ValidationError

from specplug import API, Checkpoint, DraftPlan, Facts, Limits, Refusal
from specplug_ngram import _store
from specplug_ngram.config import NgramConfig
from specplug_ngram.plugin import LEAST_BYTES, SPEC, plan, specplug_algorithms, specplug_defaults

BARE = Facts.empty()
FULL = Facts(target=Checkpoint(), features=frozenset({"tree_verify", "rollback"}))
MANY = Facts(target=Checkpoint(), limits=Limits(max_running_requests=64), features=FULL.features)
WITH_DRAFT = Facts(target=Checkpoint(), draft=Checkpoint(path="draft"), features=FULL.features)


def test_manifest_leaves_torch_unimported() -> None:
    code = "import sys, specplug_ngram.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_manifest_offers_one_algorithm_for_this_api() -> None:
    assert tuple(specplug_algorithms()) == (SPEC,)
    assert SPEC.name == "ngram"
    assert SPEC.api[0] == API[0]
    assert SPEC.api <= API
    assert SPEC.drafter == "specplug_ngram.drafter:NgramDrafter"


def test_documented_defaults() -> None:
    assert NgramConfig().model_dump() == {
        "num_draft_tokens": 16,
        "ngram_min_match": 1,
        "ngram_max_trie_depth": 18,
        "ngram_min_bfs_breadth": 1,
        "ngram_max_bfs_breadth": 10,
        "ngram_match_type": "bfs",
        "ngram_min_confidence": 0.1,
        "ngram_min_gain": 0.8,
        "ngram_store_mb": 256,
        "ngram_shared": False,
        "ngram_external_corpus_path": None,
        "ngram_external_sam_budget": 0,
    }


def test_every_option_is_described_and_bounded() -> None:
    for name, field in NgramConfig.model_json_schema()["properties"].items():
        assert field["description"], name
        kinds = [field, *field.get("anyOf", [])]
        if field.get("type") == "boolean" or name == "ngram_external_corpus_path":
            continue
        assert any("enum" in k or ("minimum" in k and "maximum" in k) for k in kinds), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_draft_tokens", 0),
        ("num_draft_tokens", 513),
        ("ngram_min_match", 0),
        ("ngram_max_trie_depth", 1),
        ("ngram_min_bfs_breadth", 0),
        ("ngram_max_bfs_breadth", 33),
        ("ngram_match_type", "lifo"),
        ("ngram_min_confidence", 1.1),
        ("ngram_min_confidence", float("nan")),
        ("ngram_min_gain", -0.1),
        ("ngram_store_mb", 0),
        ("ngram_store_mb", 1.5),
        ("ngram_external_sam_budget", -1),
        ("ngram_external_corpus_path", ""),
        ("ngram_capacity", 5),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        NgramConfig.model_validate({field: value})


def test_plan_counts_the_root_out() -> None:
    made = plan(NgramConfig(), FULL, None)
    assert isinstance(made, DraftPlan)
    assert (made.nodes, made.depth) == (15, 15)
    assert made.needs.shapes == {"tree"}
    assert made.needs.runs_on == {"host"}
    assert made.needs.variable_depth


@pytest.mark.parametrize(
    ("fields", "depth", "nodes", "longest", "shape"),
    [
        ({}, 4, 15, 4, "tree"),
        ({}, 40, 15, 15, "tree"),
        ({}, 0, 0, 0, "chain"),
        ({"num_draft_tokens": None}, None, 15, 15, "tree"),
        ({"num_draft_tokens": 1}, None, 0, 0, "chain"),
        ({"num_draft_tokens": 2}, None, 1, 1, "chain"),
        ({"ngram_max_bfs_breadth": 1}, None, 15, 15, "chain"),
        ({"ngram_max_bfs_breadth": 1}, 4, 4, 4, "chain"),
    ],
)
def test_plan_sizes(fields: dict[str, object], depth: int | None, nodes: int, longest: int, shape: str) -> None:
    made = plan(NgramConfig.model_validate(fields), FULL, depth)
    assert isinstance(made, DraftPlan)
    assert (made.nodes, made.depth, made.needs.shapes) == (nodes, longest, {shape})


@pytest.mark.parametrize(
    ("fields", "facts", "named", "way_out"),
    [
        ({"ngram_min_bfs_breadth": 5, "ngram_max_bfs_breadth": 2}, FULL, "ngram_min_bfs_breadth 5", "breadth 1 to 2"),
        ({"ngram_min_match": 9, "ngram_max_trie_depth": 4}, FULL, "ngram_min_match 9", "min-match 1 to 4"),
        ({"ngram_max_bfs_breadth": 3}, BARE, "ngram_max_bfs_breadth 3", "max-bfs-breadth 1"),
        ({"num_draft_tokens": 4, "ngram_min_gain": 3.5}, FULL, "ngram_min_gain 3.5", "min-gain 0 to 3"),
        ({"ngram_store_mb": 1}, MANY, "ngram_store_mb 1", "store-mb 5"),
        ({"ngram_store_mb": 1, "ngram_shared": True}, MANY, "ngram_store_mb 1", "store-mb 9"),
        ({"ngram_external_sam_budget": 3}, FULL, "ngram_external_sam_budget 3", "corpus-path FILE"),
        ({"ngram_external_corpus_path": "x"}, FULL, "ngram_external_sam_budget 0", "sam-budget 1 to 15"),
        (
            {"ngram_external_corpus_path": "x", "ngram_external_sam_budget": 16},
            FULL,
            "ngram_external_sam_budget 16 is above the 15 drafts",
            "num-draft-tokens 17",
        ),
        ({}, WITH_DRAFT, "no draft model", "leave out --speculative-draft-model-path"),
    ],
)
def test_refusals_name_the_option_and_the_way_out(
    fields: dict[str, object], facts: Facts, named: str, way_out: str
) -> None:
    answer = plan(NgramConfig.model_validate(fields), facts, None)
    assert isinstance(answer, Refusal)
    assert named in answer.reason
    assert way_out in answer.try_instead
    assert "\n" not in answer.reason + answer.try_instead


def test_plan_grid_never_raises_and_stays_within_the_spec() -> None:
    grid = itertools.product(
        (1, 2, 3, 16, 512), (1, 4, 256), (2, 18, 256), (1, 10, 32), (1, 10, 32), (BARE, FULL, WITH_DRAFT)
    )
    for tokens, match, longest, narrow, wide, facts in grid:
        config = NgramConfig(
            num_draft_tokens=tokens,
            ngram_min_match=match,
            ngram_max_trie_depth=longest,
            ngram_min_bfs_breadth=narrow,
            ngram_max_bfs_breadth=wide,
        )
        for depth in (None, -1, 0, 1, 7, 10_000):
            made = plan(config, facts, depth)
            if isinstance(made, Refusal):
                assert made.reason
                assert made.try_instead
                continue
            assert made.nodes <= tokens - 1
            assert made.depth <= made.nodes
            assert depth is None or made.depth <= max(0, depth)
            assert not made.needs.exceeding(SPEC.capabilities)
            assert ("tree" in made.needs.shapes) == (wide > 1 and made.nodes > 1)


def test_without_tree_verify_the_default_breadth_narrows_and_says_why() -> None:
    offered = specplug_defaults("ngram", {}, BARE)
    assert offered is not None
    assert offered.values == {"ngram_max_bfs_breadth": 1}
    assert offered.source == "algorithm"
    assert "trees" in offered.because
    assert isinstance(plan(NgramConfig(**offered.values), BARE, None), DraftPlan)


def test_defaults_leave_everything_else_alone() -> None:
    assert specplug_defaults("ngram", {}, FULL) is None
    assert specplug_defaults("ngram", {"ngram_max_bfs_breadth": 4}, BARE) is None
    assert specplug_defaults("other", {}, BARE) is None


def test_options_of_other_engines_say_what_to_write() -> None:
    for option, text in SPEC.foreign_options.items():
        assert option == option.strip("-").lower()
        assert option.removeprefix("speculative-").replace("-", "_") not in NgramConfig.model_fields
        assert "write --" in text or "leave it out" in text


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("longest", [2, 18, 256])
@pytest.mark.parametrize("requests", [1, 3, 13, 500, 4096])
def test_least_memory_is_enough_for_the_store(requests: int, longest: int, shared: bool) -> None:
    """What `plan` lets through, the store takes; and it asks for little more than that needs."""
    assert LEAST_BYTES == _store.LEAST_BYTES
    facts = FULL.model_copy(update={"limits": Limits(max_running_requests=requests)})
    fields = {"ngram_shared": shared, "ngram_max_trie_depth": longest}
    fields |= {"ngram_external_corpus_path": "x", "ngram_external_sam_budget": 4}
    answers = {mb: plan(NgramConfig(**fields, ngram_store_mb=mb), facts, None) for mb in range(1, 700)}
    least = min(mb for mb, answer in answers.items() if isinstance(answer, DraftPlan))
    options = dict(slots=requests, nodes=15, max_depth=longest, shared=shared, corpus_nodes=4)
    options |= dict(min_match=1, min_breadth=1, max_breadth=1, by_count=False, min_confidence=0.0, min_gain=0.0)
    store = _store.Store(**options, bytes=least << 20)
    for slot in range(requests):
        store.admit(slot)
    assert store.stats()["bytes"] <= least << 20
    if least > 2:
        with pytest.raises(ValueError, match="at least"):
            _store.Store(**options, bytes=(least - 2) << 20)
