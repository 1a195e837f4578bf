"""The manifest: options, plans and refusals."""

import subprocess
import sys
from typing import Any

import dflash_tiny as tiny
import pytest
from pydantic import ValidationError

from specplug import API, AlgorithmSpec, Checkpoint, DraftPlan, Facts, KVLayers, Limits, Problem, Refusal, TapRequest
from specplug.testing.targets import decoder_config
from specplug_dflash.config import DFlashConfig, DSparkConfig
from specplug_dflash.plugin import SPECS, specplug_algorithms, specplug_check, specplug_defaults

TARGET = Checkpoint(path="target", config=decoder_config(64))
CONFIGS = {"dflash": DFlashConfig, "dspark": DSparkConfig}
BY_NAME: dict[str, AlgorithmSpec] = {spec.name: spec for spec in SPECS}


def facts(config: dict[str, Any] | None, weights: Any = None, **changes: Any) -> Facts:
    tensors = None if weights is None else {name: ("float32", tuple(weights[name].shape)) for name in weights}
    draft = None if config is None else Checkpoint(path="draft", config=config, tensors=tensors)
    return Facts(target=TARGET, draft=draft, **changes)


def answer(algorithm: str, given: Facts, depth: int | None = None, **options: Any) -> DraftPlan | Refusal:
    return BY_NAME[algorithm].plan(CONFIGS[algorithm](**options), given, depth)


def planned(algorithm: str, given: Facts, depth: int | None = None, **options: Any) -> DraftPlan:
    made = answer(algorithm, given, depth, **options)
    assert isinstance(made, DraftPlan), made
    return made


ZLAB, DSPARK = facts(tiny.zlab_config()), facts(tiny.dspark_config())


def test_manifest_leaves_torch_unimported() -> None:
    code = "import sys, specplug_dflash.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_manifest_offers_both_for_this_api() -> None:
    assert tuple(specplug_algorithms()) == SPECS
    assert [spec.name for spec in SPECS] == ["dflash", "dspark"]
    assert all(spec.api[0] == API[0] and spec.api <= API for spec in SPECS)


def test_documented_defaults() -> None:
    shared = {"num_draft_tokens": None, "num_steps": 1, "eagle_topk": 1}
    assert DFlashConfig().model_dump() == {**shared, "draft_sampling": False, "dflash_block_size": None}
    assert DSparkConfig().model_dump() == {
        **shared,
        "draft_sampling": True,
        "dspark_block_size": None,
        "dspark_confidence_threshold": 0.0,
    }


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (DFlashConfig, "num_draft_tokens", 0),
        (DFlashConfig, "num_draft_tokens", 66),
        (DFlashConfig, "num_steps", 0),
        (DFlashConfig, "eagle_topk", 0),
        (DFlashConfig, "dflash_block_size", 1),
        (DFlashConfig, "dflash_block_size", 65),
        (DSparkConfig, "dspark_block_size", 0),
        (DSparkConfig, "dspark_confidence_threshold", -0.1),
        (DSparkConfig, "dspark_confidence_threshold", 1.0),
    ],
)
def test_values_out_of_range_are_refused(model: Any, field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        model.model_validate({field: value})


@pytest.mark.parametrize(
    ("algorithm", "options", "depth", "nodes"),
    [
        ("dflash", {}, None, 4),
        ("dflash", {}, 2, 2),
        ("dflash", {}, 0, 0),
        ("dflash", {}, 9, 4),
        ("dflash", {"dflash_block_size": 3}, None, 2),
        ("dflash", {"num_draft_tokens": 3}, None, 2),
        ("dflash", {"num_draft_tokens": 3, "dflash_block_size": 3}, None, 2),
        ("dflash", {"num_draft_tokens": 1}, None, 0),
        ("dspark", {}, None, 5),
        ("dspark", {"dspark_block_size": 3}, None, 3),
        ("dspark", {"num_draft_tokens": 4}, None, 3),
        ("dspark", {"num_draft_tokens": 4, "dspark_block_size": 3}, None, 3),
        ("dspark", {"dspark_block_size": 1}, 4, 1),
    ],
)
def test_plan_sizes(algorithm: str, options: dict[str, Any], depth: int | None, nodes: int) -> None:
    given = ZLAB if algorithm == "dflash" else DSPARK
    made = planned(algorithm, given, depth, **options)
    assert (made.nodes, made.depth) == (nodes, nodes)
    # The block is computed as it was trained, however much of it is used.
    assert made.kv == (KVLayers(layers=2, kv_heads=2, k_dim=8, v_dim=8, scratch_rows=5),)
    assert made.needs.taps == (TapRequest(at=0), TapRequest(at=2))
    assert made.needs.shapes == {"block"}
    assert not made.needs.exceeding(BY_NAME[algorithm].capabilities)
    assert not made.reads_back


def test_plan_follows_layers_and_windows() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    given = facts(tiny.zlab_config(num_hidden_layers=3, layer_types=kinds, sliding_window=12))
    assert [(group.layers, group.window) for group in planned("dflash", given).kv] == [(1, None), (2, 12)]


def test_what_the_draft_does_not_hold_is_borrowed() -> None:
    plain, full = tiny.body(), tiny.body() | tiny.ends()
    assert planned("dflash", facts(tiny.zlab_config(), plain)).needs.borrows == {"embed_tokens", "lm_head"}
    assert planned("dflash", facts(tiny.zlab_config(), full)).needs.borrows == frozenset()
    half = plain | {"embed_tokens.weight": full["embed_tokens.weight"]}
    assert planned("dflash", facts(tiny.zlab_config(), half)).needs.borrows == {"lm_head"}


def test_a_vocabulary_of_its_own_is_declared() -> None:
    weights = tiny.body() | tiny.ends(rows=40)
    weights["d2t"] = weights["lm_head.weight"][:, 0]
    made = planned("dflash", facts(tiny.zlab_config(draft_vocab_size=40), weights))
    assert made.needs.vocab == "mapped"
    assert made.bytes_fixed == planned("dflash", ZLAB).bytes_fixed + 40 * 8
    assert planned("dflash", ZLAB).needs.vocab == "same"


@pytest.mark.parametrize(
    ("window", "context", "last"), [(512, None, None), (100, None, 99), (100, 100, None), (100, 101, 99)]
)
def test_plan_ends_with_the_drafts_positions(window: int, context: int | None, last: int | None) -> None:
    given = facts(tiny.zlab_config(max_position_embeddings=window), limits=Limits(context_length=context))
    assert planned("dflash", given).max_position == last


def test_sampling_is_what_makes_it_dense() -> None:
    for algorithm, given, usual in (("dflash", ZLAB, "one_hot"), ("dspark", DSPARK, "dense")):
        assert planned(algorithm, given).needs.proposal_probs == usual
        assert planned(algorithm, given, draft_sampling=True).needs.proposal_probs == "dense"
        assert planned(algorithm, given, draft_sampling=False).needs.proposal_probs == "one_hot"


def test_a_threshold_reads_back() -> None:
    assert planned("dspark", DSPARK, dspark_confidence_threshold=0.3).reads_back


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_a_draft_of_the_next_slot_without_heads_is_either(algorithm: str) -> None:
    """deepseek-ai/dflash_*_block7: the class is DSpark's, the method is DFlash's."""
    given = facts(tiny.dspark_config(rank=0, enable_confidence_head=False, confidence_head_with_markov=False))
    assert planned(algorithm, given).nodes == 5
    assert planned(algorithm, given, num_draft_tokens=4).nodes == 3
    assert planned(algorithm, given, **{f"{algorithm}_block_size": 3}).nodes == 3


@pytest.mark.parametrize(
    ("algorithm", "given", "options", "named", "way_out"),
    [
        ("dflash", ZLAB, {"num_steps": 2}, "num_steps 2", "--speculative-num-steps 1"),
        ("dspark", DSPARK, {"eagle_topk": 4}, "eagle_topk 4", "--speculative-eagle-topk 1"),
        ("dflash", facts(None), {}, "none is given", "--speculative-draft-model-path DRAFT"),
        ("dflash", ZLAB, {"dflash_block_size": 6}, "dflash_block_size 6", "--speculative-dflash-block-size 5"),
        ("dspark", DSPARK, {"dspark_block_size": 6}, "dspark_block_size 6", "--speculative-dspark-block-size 5"),
        ("dflash", ZLAB, {"num_draft_tokens": 6}, "num_draft_tokens 6", "--speculative-num-draft-tokens 5"),
        ("dspark", DSPARK, {"num_draft_tokens": 7}, "num_draft_tokens 7", "--speculative-num-draft-tokens 6"),
        (
            "dflash",
            ZLAB,
            {"num_draft_tokens": 4, "dflash_block_size": 3},
            "num_draft_tokens 4 and dflash_block_size 3 disagree",
            "--speculative-num-draft-tokens 3",
        ),
        (
            "dspark",
            DSPARK,
            {"num_draft_tokens": 3, "dspark_block_size": 3},
            "num_draft_tokens 3 and dspark_block_size 3 disagree",
            "--speculative-num-draft-tokens 4",
        ),
        ("dflash", DSPARK, {}, "Markov head", "--speculative-algorithm DSPARK"),
        ("dspark", ZLAB, {}, "no Markov head", "--speculative-algorithm DFLASH"),
        (
            "dspark",
            facts(tiny.dspark_config(enable_confidence_head=False)),
            {"dspark_confidence_threshold": 0.5},
            "dspark_confidence_threshold 0.5",
            "threshold 0",
        ),
    ],
)
def test_refusals_name_the_option_and_the_way_out(
    algorithm: str, given: Facts, options: dict[str, Any], named: str, way_out: str
) -> None:
    refused = answer(algorithm, given, **options)
    assert isinstance(refused, Refusal)
    assert named in refused.reason
    assert way_out in refused.try_instead
    assert "\n" not in refused.reason + refused.try_instead


def test_the_block_size_is_the_checkpoints_unless_something_is_asked_for() -> None:
    offered = specplug_defaults("dspark", {}, DSPARK)
    assert offered is not None
    assert (offered.values, offered.source) == ({"dspark_block_size": 5}, "checkpoint")
    assert "5 tokens and the root" in offered.because
    assert specplug_defaults("dspark", {"num_draft_tokens": 3}, DSPARK) is None
    assert specplug_defaults("dspark", {"dspark_block_size": 3}, DSPARK) is None
    assert specplug_defaults("dflash", {}, facts(None)) is None
    assert specplug_defaults("other", {}, DSPARK) is None


def test_a_draft_that_names_no_block_size() -> None:
    config = tiny.zlab_config()
    del config["block_size"]
    given = facts(config)
    assert specplug_defaults("dflash", {}, given) is None
    (problem,) = specplug_check("dflash", DFlashConfig(), planned("dflash", given), given)
    assert isinstance(problem, Problem)
    assert (problem.severity, problem.field) == ("warning", "dflash_block_size")
    assert planned("dflash", given).nodes == 15
    for options in ({"dflash_block_size": 9}, {"num_draft_tokens": 9}):
        made = planned("dflash", given, **options)
        assert (made.nodes, made.kv[0].scratch_rows) == (8, 9)
        assert specplug_check("dflash", DFlashConfig(**options), made, given) == ()
    assert specplug_check("dflash", DFlashConfig(), planned("dflash", ZLAB), ZLAB) == ()
    assert specplug_check("other", DFlashConfig(), planned("dflash", ZLAB), ZLAB) == ()
