"""The manifest of frozen-kv-mtp: options, plans and refusals; no model is built."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from specplug import API, Checkpoint, DraftPlan, Facts, Refusal, TapRequest, UserError
from specplug_mtp.frozen_config import FrozenConfig
from specplug_mtp.frozen_plan import SPEC, defaults, objections, plan, suppressed
from specplug_mtp.frozen_sizes import FULL, SLIDING, Frequencies, ReadingLayer, assistant_sizes

# What the published configs say that matters here; sizes of E2B and of 31B.
SMALL_TARGET = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 1536,
        "vocab_size": 262144,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
    },
}
SMALL = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": True,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 0,
        "vocab_size": 262144,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            FULL: {"rope_theta": 1000000.0, "partial_rotary_factor": 0.25, "rope_type": "proportional"},
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
}
LARGE_TARGET = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 5376,
        "vocab_size": 262144,
        "num_hidden_layers": 60,
        "num_kv_shared_layers": 0,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
    },
}
LARGE = {
    **SMALL,
    "backbone_hidden_size": 5376,
    "use_ordered_embeddings": False,
    "text_config": {
        **SMALL["text_config"],
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
    },
}
FULL_FACTS = Facts(
    target=Checkpoint(path="target", config=SMALL_TARGET),
    draft=Checkpoint(path="draft", config=SMALL),
    dtype="bfloat16",
    features=frozenset({"rollback", "taps", "read_kv", "borrow:embed_tokens"}),
)


def drafting(top: dict[str, Any] | None = None, **text: Any) -> Facts:
    config = {**SMALL, **(top or {}), "text_config": {**SMALL["text_config"], **text}}
    return FULL_FACTS.model_copy(update={"draft": Checkpoint(path="draft", config=config)})


def planned(config: dict[str, Any] | None = None, facts: Facts = FULL_FACTS, depth: int | None = None) -> DraftPlan:
    made = plan(FrozenConfig(**(config or {})), facts, depth)
    assert isinstance(made, DraftPlan), made
    return made


def test_manifest_leaves_torch_unimported() -> None:
    code = "import sys, specplug_mtp.frozen_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_spec_is_for_this_api() -> None:
    assert SPEC.name == "frozen-kv-mtp"
    assert SPEC.api[0] == API[0]
    assert SPEC.api <= API


def test_documented_defaults() -> None:
    assert FrozenConfig().model_dump() == {
        "num_draft_tokens": None,
        "num_steps": 4,
        "eagle_topk": 1,
        "draft_sampling": False,
        "frozen_position": "committed",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_draft_tokens", 0), ("num_draft_tokens", 66), ("num_steps", 0), ("num_steps", 65), ("frozen_position", "x")],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        FrozenConfig.model_validate({field: value})


@pytest.mark.parametrize(
    ("config", "depth", "nodes"),
    [
        ({}, None, 4),
        ({}, 2, 2),
        ({}, 9, 4),
        ({}, 0, 0),
        ({"num_draft_tokens": 3}, None, 2),
        ({"num_draft_tokens": 1}, None, 0),
        ({"num_steps": 6, "num_draft_tokens": 5}, None, 4),
    ],
)
def test_plan_sizes(config: dict[str, Any], depth: int | None, nodes: int) -> None:
    made = planned(config, depth=depth)
    assert (made.nodes, made.depth) == (nodes, nodes)
    assert made.kv == ()
    assert made.bytes_per_slot == 1536 * 2
    assert made.bytes_fixed == 0
    assert made.needs.taps == (TapRequest(at="final_norm"),)
    assert made.needs.draft_kv == {"reads_target"}
    assert not made.needs.exceeding(SPEC.capabilities)


def test_sampling_is_what_makes_it_dense() -> None:
    assert planned().needs.proposal_probs == "one_hot"
    assert planned({"draft_sampling": True}).needs.proposal_probs == "dense"


def test_a_small_assistant_reads_the_last_layers_that_keep_kv() -> None:
    sizes = assistant_sizes(SMALL, SMALL_TARGET)
    sliding = ReadingLayer(SLIDING, heads=4, head_dim=256, window=512, reads=13)  # 15 of 35 layers keep KV
    assert sizes.layers == (sliding, sliding, sliding, ReadingLayer(FULL, heads=4, head_dim=512, window=None, reads=14))
    assert sizes.rope == {SLIDING: Frequencies(1e4, 128, 128), FULL: Frequencies(1e6, 256, 64)}
    assert (sizes.centroids, sizes.chosen) == (2048, 32)


def test_a_large_assistant_reads_the_last_layers() -> None:
    sizes = assistant_sizes(LARGE, LARGE_TARGET)
    assert [layer.reads for layer in sizes.layers] == [58, 58, 58, 59]
    assert sizes.layers[0].window == 1024
    assert (sizes.centroids, sizes.hidden_size, sizes.backbone_size) == (None, 1024, 5376)


def test_layer_overrides_say_what_kinds_say() -> None:
    """Newer files list what differs from the common sizes by layer."""

    def by_layer(config: dict[str, Any], **override: int) -> dict[str, Any]:
        text = dict(config["text_config"])
        text.pop("global_head_dim")
        text.pop("num_global_key_value_heads", None)
        own = {str(at): override for at, kind in enumerate(text["layer_types"]) if kind == FULL}
        return {**config, "text_config": {**text, "per_layer_config": own}}

    large = by_layer(LARGE, head_dim=512), by_layer(LARGE_TARGET, head_dim=512, num_key_value_heads=4)
    assert assistant_sizes(*large) == assistant_sizes(LARGE, LARGE_TARGET)
    assert assistant_sizes(by_layer(SMALL, head_dim=512), SMALL_TARGET) == assistant_sizes(SMALL, SMALL_TARGET)
    with pytest.raises(UserError, match="no multiple of the 5 KV heads"):
        assistant_sizes(large[0], by_layer(LARGE_TARGET, head_dim=512, num_key_value_heads=5))


NO_FULL = {**SMALL_TARGET["text_config"], "num_kv_shared_layers": 31}


@pytest.mark.parametrize(
    ("config", "facts", "named", "way_out"),
    [
        ({"eagle_topk": 4}, FULL_FACTS, "eagle_topk 4", "topk 1"),
        ({}, FULL_FACTS.model_copy(update={"draft": None}), "none is given", "model-path ASSISTANT"),
        ({}, drafting({"architectures": ["LlamaForCausalLM"]}), "architecture LlamaForCausalLM", "trained for MODEL"),
        ({}, drafting({"backbone_hidden_size": 2560}), "hidden_size 2560, and MODEL has 1536", "trained for MODEL"),
        ({}, drafting(vocab_size=4096), "vocab_size 4096, and MODEL has 262144", "trained for MODEL"),
        ({}, drafting(global_head_dim=256), "layer 3 has heads of 256", "trained for MODEL"),
        ({}, drafting(enable_moe_block=True), "enable_moe_block = True", "trained for MODEL"),
        ({}, drafting(hidden_size_per_layer_input=8), "hidden_size_per_layer_input = 8", "trained for MODEL"),
        ({}, drafting(num_kv_shared_layers=2), "num_kv_shared_layers = 2", "trained for MODEL"),
        ({}, drafting(hidden_size=None), "hidden_size = None", "trained for MODEL"),
        ({}, drafting(layer_types=["linear_attention"] * 4), "layer_types", "trained for MODEL"),
        ({}, drafting({"tie_word_embeddings": False}), "tie_word_embeddings = False", "trained for MODEL"),
        ({}, drafting({"num_centroids": 1000}), "1000 centroids", "trained for MODEL"),
        ({}, drafting(rope_parameters={FULL: {"rope_type": "yarn"}}), "rope_type = 'yarn'", "trained for MODEL"),
        (
            {},
            FULL_FACTS.model_copy(update={"target": Checkpoint(config={"text_config": NO_FULL})}),
            "of kind full_attention, and MODEL keeps none",
            "trained for MODEL",
        ),
        (
            {},
            FULL_FACTS.model_copy(update={"first_vocab_difference": (7, "a", "b")}),
            "id 7 is 'a'",
            "trained for MODEL",
        ),
    ],
)
def test_refusals_name_what_is_wrong_and_the_way_out(
    config: dict[str, Any], facts: Facts, named: str, way_out: str
) -> None:
    answer = plan(FrozenConfig(**config), facts, None)
    assert isinstance(answer, Refusal)
    assert named in answer.reason
    assert way_out in answer.try_instead
    assert "\n" not in answer.reason + answer.try_instead


def test_an_unstated_count_of_shared_layers_is_all_of_them() -> None:
    assert planned(facts=drafting(num_kv_shared_layers=0)) == planned()


def test_suppressed_tokens_of_both_models_cost_a_table() -> None:
    target = FULL_FACTS.target.model_copy(update={"generation": {"suppress_tokens": [9, 262144, -1]}})
    draft = Checkpoint(path="draft", config=SMALL, generation={"suppress_tokens": [4, 9]})
    facts = FULL_FACTS.model_copy(update={"target": target, "draft": draft})
    assert suppressed(facts, 262144) == (4, 9)
    assert planned(facts=facts).bytes_fixed == 262144


def test_num_steps_follows_num_draft_tokens() -> None:
    offered = defaults({"num_draft_tokens": 6})
    assert offered is not None
    assert offered.values == {"num_steps": 5}
    assert defaults({"num_draft_tokens": 6, "num_steps": 2}) is None
    assert defaults({"num_draft_tokens": 1}) is None


def test_what_is_hardly_meant_is_said() -> None:
    assert not list(objections(FrozenConfig(num_draft_tokens=5)))
    (odd,) = objections(FrozenConfig(num_draft_tokens=4))
    assert (odd.severity, "3 tokens are drafted" in odd.message) == ("warning", True)
