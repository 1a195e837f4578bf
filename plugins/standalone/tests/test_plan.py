"""The manifest: options, plans and refusals."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specplug import API, Checkpoint, DraftPlan, Facts, KVLayers, Limits, Problem, Refusal, RefusedError, UserError
from specplug.testing.targets import decoder_config
from specplug_standalone.config import StandaloneConfig
from specplug_standalone.plugin import SPEC, plan, specplug_algorithms, specplug_check, specplug_defaults

CONFIG = decoder_config(64)
TARGET = Checkpoint(path="target", config=CONFIG)
DRAFT = Checkpoint(path="draft", config=CONFIG)
FULL = Facts(target=TARGET, draft=DRAFT, features=frozenset({"own_kv", "rollback"}))


def drafting(config: dict[str, Any] | None = None, **rest: Any) -> Facts:
    return FULL.model_copy(update={"draft": Checkpoint(path="draft", config={**CONFIG, **(config or {})}, **rest)})


def planned(config: dict[str, Any] | None = None, facts: Facts = FULL, depth: int | None = None) -> DraftPlan:
    made = plan(StandaloneConfig(**(config or {})), facts, depth)
    assert isinstance(made, DraftPlan), made
    return made


def test_manifest_leaves_torch_unimported() -> None:
    code = "import sys, specplug_standalone.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_manifest_offers_one_algorithm_for_this_api() -> None:
    assert tuple(specplug_algorithms()) == (SPEC,)
    assert SPEC.name == "standalone"
    assert SPEC.api[0] == API[0]
    assert SPEC.api <= API


def test_documented_defaults() -> None:
    assert StandaloneConfig().model_dump() == {
        "num_draft_tokens": None,
        "num_steps": 3,
        "eagle_topk": 1,
        "draft_sampling": False,
        "standalone_heterogeneous_vocab": False,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_draft_tokens", 0), ("num_draft_tokens", 66), ("num_steps", 0), ("num_steps", 65), ("eagle_topk", 0)],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        StandaloneConfig.model_validate({field: value})


@pytest.mark.parametrize(
    ("config", "depth", "nodes"),
    [
        ({}, None, 3),
        ({}, 2, 2),
        ({}, 9, 3),
        ({}, 0, 0),
        ({"num_steps": 5}, None, 5),
        ({"num_draft_tokens": 3}, None, 2),
        ({"num_draft_tokens": 9}, None, 3),
        ({"num_draft_tokens": 1}, None, 0),
        ({"num_steps": 5, "num_draft_tokens": 4}, None, 3),
    ],
)
def test_plan_sizes(config: dict[str, Any], depth: int | None, nodes: int) -> None:
    made = planned(config, depth=depth)
    assert (made.nodes, made.depth) == (nodes, nodes)
    assert made.kv == (KVLayers(layers=2, kv_heads=2, k_dim=8, v_dim=8, scratch_rows=nodes),)
    assert made.bytes_per_slot == 32 * 4
    assert made.bytes_fixed == 0
    assert not made.needs.exceeding(SPEC.capabilities)


def test_plan_follows_the_layers_of_the_draft() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    assert planned(facts=drafting(mistral)).kv[0].window == 16
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    found = planned(facts=drafting({**qwen, "max_window_layers": 1, "num_hidden_layers": 3})).kv
    assert [(group.layers, group.window) for group in found] == [(1, None), (2, 8)]


@pytest.mark.parametrize(
    ("window", "context", "last"), [(512, None, None), (100, None, 99), (100, 100, None), (100, 101, 99)]
)
def test_plan_ends_with_the_drafts_window(window: int, context: int | None, last: int | None) -> None:
    facts = drafting({"max_position_embeddings": window})
    facts = facts.model_copy(update={"limits": Limits(context_length=context)})
    assert planned(facts=facts).max_position == last


def test_sampling_is_what_makes_it_dense() -> None:
    assert planned().needs.proposal_probs == "one_hot"
    assert planned({"draft_sampling": True}).needs.proposal_probs == "dense"


OTHER = (7, "seven", "sept")


@pytest.mark.parametrize(
    ("config", "facts", "named", "way_out"),
    [
        ({"eagle_topk": 4}, FULL, "eagle_topk 4", "topk 1"),
        ({}, FULL.model_copy(update={"draft": None}), "none is given", "--speculative-draft-model-path MODEL"),
        ({}, drafting({"architectures": []}), "the draft model has architecture none named", "causal language model"),
        ({}, drafting({"hidden_size": None}), "the draft model: config.json has hidden_size = None", "causal"),
        ({}, drafting({"quantization_config": {"quant_method": "gptq"}}), "the draft model holds", "causal"),
        ({}, drafting(tensors={"fc.weight": ("float32", (1, 1))}), "holds no embed_tokens.weight", "causal"),
        ({}, FULL.model_copy(update={"first_vocab_difference": OTHER}), "id 7 is 'seven'", "heterogeneous-vocab"),
    ],
)
def test_refusals_name_the_option_and_the_way_out(
    config: dict[str, Any], facts: Facts, named: str, way_out: str
) -> None:
    if not facts.draft or not facts.draft.config["architectures"]:
        facts = facts.model_copy(update={"draft": facts.draft and facts.draft.model_copy(update={"path": ""})})
    answer = plan(StandaloneConfig(**config), facts, None)
    assert isinstance(answer, Refusal)
    assert named in answer.reason
    assert way_out in answer.try_instead
    assert "\n" not in answer.reason + answer.try_instead


def test_another_vocabulary_is_let_through_when_asked_for() -> None:
    facts = FULL.model_copy(update={"first_vocab_difference": OTHER})
    made = planned({"standalone_heterogeneous_vocab": True}, facts)
    assert made.needs.vocab == "mapped"
    assert made.bytes_fixed == 3 * 64 * 8


def test_num_steps_follows_num_draft_tokens() -> None:
    offered = specplug_defaults("standalone", {"num_draft_tokens": 6}, FULL)
    assert offered is not None
    assert offered.values == {"num_steps": 5}
    assert specplug_defaults("standalone", {"num_draft_tokens": 6, "num_steps": 2}, FULL) is None
    assert specplug_defaults("standalone", {"num_draft_tokens": 1}, FULL) is None
    assert specplug_defaults("standalone", {}, FULL) is None
    assert specplug_defaults("other", {"num_draft_tokens": 6}, FULL) is None


def checked(config: dict[str, Any], facts: Facts) -> list[Problem]:
    wanted = StandaloneConfig(**config)
    made = plan(wanted, facts, None)
    assert isinstance(made, DraftPlan)
    return list(specplug_check("standalone", wanted, made, facts))


def test_what_is_hardly_meant_is_said() -> None:
    assert not checked({}, FULL)
    (same,) = checked({}, FULL.model_copy(update={"draft": DRAFT.model_copy(update={"path": "target"})}))
    assert (same.severity, same.field) == ("warning", "draft_model_path")
    assert not checked({"num_steps": 4, "num_draft_tokens": 5}, FULL)
    (odd,) = checked({"num_steps": 4, "num_draft_tokens": 4}, FULL)
    assert "3 tokens are drafted" in odd.message
    with_tokenizer = FULL.model_copy(update={"target": TARGET.model_copy(update={"tokenizer_size": 64})})
    (unknown,) = checked({}, with_tokenizer)
    assert "the draft model has no tokenizer" in unknown.message


def test_unreadable_tokenizers_are_refused_before_weights_load(tmp_path: Path) -> None:
    facts = FULL.model_copy(update={"first_vocab_difference": OTHER})
    (problem,) = checked({"standalone_heterogeneous_vocab": True}, facts)
    assert problem.severity == "error"
    assert "tokenizer.json is needed" in problem.message


def test_the_engine_quotes_the_first_id_that_differs(swapped: Any) -> None:
    from specplug import Engine

    with pytest.raises(RefusedError, match=r"id 97 is '<0x61>' in the target's and '<0x62>' in the draft's") as told:
        Engine(swapped.loaded, algorithm="standalone", speculative_draft_model_path=str(swapped.draft))
    assert "\n" not in str(told.value)


def test_weights_that_do_not_fit_name_the_draft(models: Any) -> None:
    lacking = models.draft(
        "lacking", lambda weights: {**weights, "model.layers.1.mlp.up_proj.extra": weights["model.norm.weight"].clone()}
    )
    with pytest.raises(UserError, match=f"--speculative-draft-model-path {lacking}: .*up_proj.extra") as told:
        models.engine(lacking)
    assert "\n" not in str(told.value)
