"""The manifest: options, defaults and plans. Refusals are in `test_refusals`."""

import itertools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head, eagle1, eagle3, official, speculators
from pydantic import ValidationError

from specplug import API, Checkpoint, DraftPlan, Facts, KVLayers, Limits, TapRequest
from specplug.testing.targets import decoder_config
from specplug_eagle.config import Eagle3Config, EagleConfig, candidates
from specplug_eagle.plugin import SPECS, plan, specplug_algorithms, specplug_check, specplug_defaults

LAYERS = 8
CONFIG: dict[str, Any] = {**decoder_config(64), "num_hidden_layers": LAYERS}
FEATURES = frozenset({"own_kv", "rollback", "tree_verify", "taps", "borrow:embed_tokens", "borrow:lm_head"})
TARGET = Checkpoint(path="target", config=CONFIG)
USUAL = (TapRequest(at=2), TapRequest(at=4), TapRequest(at=5))


def facts_of(head: Head, target: Checkpoint = TARGET, stored: bool = True, **rest: Any) -> Facts:
    tensors = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in head.tensors.items()}
    given = {"path": "draft", "config": head.config, "tensors": tensors if stored else None}
    return Facts(target=target, draft=Checkpoint.model_validate(given), features=FEATURES, **rest)


def head3(**options: Any) -> Head:
    return eagle3(CONFIG, **{"boundaries": (2, 4, 5), **options})


FACTS = facts_of(official(head3()))


def planned(
    config: Mapping[str, Any] | None = None, facts: Facts = FACTS, depth: int | None = None, version: int = 3
) -> DraftPlan:
    made = plan((Eagle3Config if version == 3 else EagleConfig)(**(config or {})), facts, depth)
    assert isinstance(made, DraftPlan), made
    return made


def test_manifest_leaves_torch_unimported() -> None:
    code = "import sys, specplug_eagle.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_manifest_offers_both_for_this_api() -> None:
    assert tuple(specplug_algorithms()) == SPECS
    assert [spec.name for spec in SPECS] == ["eagle", "eagle3"]
    assert all(spec.api[0] == API[0] and spec.api <= API for spec in SPECS)
    assert SPECS[1].aliases == ("eagle-3",)
    assert not SPECS[0].aliases


def test_documented_defaults() -> None:
    shared = {
        "num_draft_tokens": None,
        "num_steps": 3,
        "eagle_topk": 1,
        "draft_sampling": False,
        "eagle_token_map": None,
    }
    assert EagleConfig().model_dump() == shared
    assert Eagle3Config().model_dump() == {
        **shared,
        "eagle_aux_layers": None,
        "eagle_aux_semantics": None,
        "eagle_norm_output": None,
        "eagle_norm_before_residual": None,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_draft_tokens", 0),
        ("num_draft_tokens", 257),
        ("num_steps", 0),
        ("num_steps", 65),
        ("eagle_topk", 0),
        ("eagle_topk", 65),
        ("eagle_token_map", ""),
        ("eagle_aux_layers", "2,x"),
        ("eagle_aux_layers", [-1]),
        ("eagle_aux_layers", []),
        ("eagle_aux_semantics", "vllm"),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        Eagle3Config.model_validate({field: value})


def test_layers_are_typed_with_commas() -> None:
    assert Eagle3Config.model_validate({"eagle_aux_layers": "2, 16,29"}).eagle_aux_layers == (2, 16, 29)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "depth", "nodes", "longest"),
    [
        ({}, None, 3, 3),
        ({}, 2, 2, 2),
        ({}, 9, 3, 3),
        ({}, 0, 0, 0),
        ({"num_steps": 5}, None, 5, 5),
        ({"num_draft_tokens": 3}, None, 2, 2),
        ({"num_draft_tokens": 9}, None, 3, 3),
        ({"num_draft_tokens": 1}, None, 0, 0),
        ({"num_steps": 5, "num_draft_tokens": 4}, None, 3, 3),
        ({"num_steps": 5, "eagle_topk": 4}, None, 7, 5),
        ({"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8}, None, 7, 5),
        ({"num_steps": 5, "eagle_topk": 8, "num_draft_tokens": 32}, None, 31, 5),
        ({"num_steps": 5, "eagle_topk": 8, "num_draft_tokens": 32}, 1, 8, 1),
        ({"num_steps": 5, "eagle_topk": 8, "num_draft_tokens": 32}, 0, 0, 0),
        ({"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 4}, None, 3, 3),
        ({"num_steps": 1, "eagle_topk": 4}, None, 4, 1),
        ({"num_steps": 12, "eagle_topk": 2}, None, 12, 12),
        ({"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 7}, None, 6, 2),
        ({"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 1}, None, 0, 0),
    ],
)
def test_plan_sizes(config: dict[str, Any], depth: int | None, nodes: int, longest: int) -> None:
    made = planned(config, depth=depth)
    assert (made.nodes, made.depth) == (nodes, longest)
    topk = config.get("eagle_topk", 1)
    rows = max(longest - 1, 0) * topk
    assert made.kv == (KVLayers(layers=1, kv_heads=2, k_dim=8, v_dim=8, scratch_rows=rows),)
    assert made.needs.shapes == {"tree" if topk > 1 else "chain"}
    assert made.bytes_per_slot == 2 * 32 * 4
    assert made.bytes_fixed == 0
    assert (made.lookahead, made.catch_up, made.reads_back) == (1, "taps", False)
    assert not made.needs.exceeding(SPECS[1].capabilities)


def test_candidates_are_counted_as_eagle2_expands() -> None:
    assert [candidates(steps, 4) for steps in range(4)] == [0, 4, 20, 36]
    assert [candidates(steps, 1) for steps in range(4)] == [0, 1, 2, 3]


def test_what_it_needs() -> None:
    third, first = planned(), planned(facts=facts_of(eagle1(CONFIG)), version=1)
    assert third.needs.taps == USUAL
    assert third.needs.borrows == {"embed_tokens"}
    assert third.needs.vocab == "mapped"
    assert first.needs.taps == (TapRequest(at="final_norm"),)
    assert first.needs.borrows == {"embed_tokens", "lm_head"}
    assert first.needs.vocab == "same"
    assert not first.needs.exceeding(SPECS[0].capabilities)
    for made in (third, first):
        assert made.needs.draft_kv == {"own_layers"}
        assert made.needs.variable_depth
        assert made.needs.graph_safe
        assert made.needs.proposal_probs == "one_hot"
    assert planned({"draft_sampling": True}).needs.proposal_probs == "dense"


def test_half_precision_takes_half_the_state() -> None:
    facts = FACTS.model_copy(update={"dtype": "bfloat16"})
    assert planned(facts=facts).bytes_per_slot == 2 * 32 * 2


def test_ends_that_may_be_copies_are_borrowed_where_they_can_be() -> None:
    shipped = facts_of(head3(rows=64, ships_embed=True))
    assert planned(facts=shipped).needs.borrows == {"embed_tokens", "lm_head"}
    alone = shipped.model_copy(update={"features": frozenset({"own_kv", "rollback", "taps"})})
    assert planned(facts=alone).needs.borrows == frozenset()
    assert planned(facts=facts_of(head3(hidden=48))).needs.borrows == frozenset()


def test_layers_are_counted_in_the_tensors() -> None:
    """EAGLE3-Vicuna1.3-13B says 40 layers and holds one; its 33B says 13 key heads, the tensors decide."""
    assert planned(facts=facts_of(head3().but({"num_hidden_layers": 40}))).kv[0].layers == 1
    assert planned(facts=facts_of(head3(layers=2))).kv[0].layers == 2
    assert planned(facts=facts_of(head3().but({"num_key_value_heads": 1}))).kv[0].kv_heads == 2
    assert planned(facts=facts_of(head3(head_dim=16).but({"head_dim": 8}))).kv[0].k_dim == 16
    assert planned(facts=facts_of(head3(head_dim=16).but({"head_dim": None}))).kv[0].k_dim == 16
    assert planned(facts=facts_of(head3(qk_norm=True, head_dim=16).but({"head_dim": None}))).kv[0].k_dim == 16


def test_an_older_key_names_the_window() -> None:
    head = head3().but({"max_position_embeddings": None, "max_sequence_length": 100})
    assert planned(facts=facts_of(head)).max_position == 99


@pytest.mark.parametrize(
    ("window", "context", "last"), [(512, None, None), (100, None, 99), (100, 100, None), (100, 101, 99)]
)
def test_speculation_ends_with_the_heads_window(window: int, context: int | None, last: int | None) -> None:
    facts = facts_of(head3().but({"max_position_embeddings": window}), limits=Limits(context_length=context))
    made = planned(facts=facts)
    assert made.max_position == last
    said = [problem.message for problem in specplug_check("eagle3", Eagle3Config(), made, facts)]
    assert any("decoded plainly" in line for line in said) == (last is not None)


@pytest.mark.parametrize("name", ["midlayer", "dummy", "no ids", "five", "multimodal target"])
def test_layers_read_of_the_target(name: str) -> None:
    head, target, stored, expected = official(head3()), TARGET, True, USUAL
    if name == "dummy":
        stored = False
    elif name == "no ids":
        head = head.but({"eagle_aux_hidden_state_layer_ids": None})
    elif name == "five":
        head = head3(boundaries=(8, 0, 1, 2, 3))
        expected = tuple(TapRequest(at=at) for at in (8, 0, 1, 2, 3))
    else:
        target = Checkpoint(path="target", config={"architectures": ["VL"], "text_config": CONFIG})
    assert planned(facts=facts_of(head, target, stored)).needs.taps == expected


def test_dummy_goes_by_config_and_word() -> None:
    """No tensor is known: the word decides for a plain config, as the authors write it."""
    plain = official(head3()).but({"eagle_aux_hidden_state_layer_ids": None})
    facts = facts_of(plain, stored=False)
    made = planned(facts=facts)
    assert made.needs.taps == USUAL
    assert made.needs.vocab == "mapped"
    unclear = facts_of(plain.but({"draft_vocab_size": None}), stored=False)
    assert planned(facts=unclear).needs.taps == USUAL
    assert planned(facts=unclear, version=1).needs.taps == (TapRequest(at="final_norm"),)
    assert planned(facts=facts_of(plain.but({"num_hidden_layers": 40}), stored=False)).kv[0].layers == 1
    qwen3 = facts_of(head3(qk_norm=True), stored=False)
    assert planned(facts=qwen3).kv == made.kv
    final = facts_of(head3(use_aux=False), stored=False)
    assert planned(facts=final).needs.taps == (TapRequest(at="final_norm"),)


def test_overrides() -> None:
    assert planned({"eagle_aux_layers": (0, 1, 8)}).needs.taps == tuple(TapRequest(at=at) for at in (0, 1, 8))
    facts = facts_of(head3(boundaries=(3, 4, 6)))
    assert [tap.at for tap in planned({"eagle_aux_semantics": "output"}, facts).needs.taps] == [4, 5, 7]


# --- shapes of published heads, from headers alone --------------------------------------------------------------------


def published(layer: str, q: int, kv: int, hidden: int, inner: int, out: int, rows: int, fc: int, **more: Any) -> Any:
    shapes = {
        "fc.weight": (hidden, fc),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
        **more,
    }
    shapes |= {"d2t": (rows,), "t2d": (out,)} if rows < out else {}
    return {name: ("bfloat16", shape) for name, shape in shapes.items()}


def test_the_authors_head_for_llama_31_8b() -> None:
    """No rope_theta, no ids, 15 tensors: base 10000, layers 2, 16 and 29, window 2048."""
    from specplug_eagle.layout import Layout, read

    tensors = published("midlayer", 4096, 1024, 4096, 14336, 128256, 32000, 12288)
    assert len(tensors) == 15
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    llama = {
        **CONFIG,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    draft = Checkpoint.model_validate({"path": "head", "config": config, "tensors": tensors})
    facts = Facts(target=Checkpoint(path="target", config=llama), draft=draft, features=FEATURES, dtype="bfloat16")
    made = planned(facts=facts)
    assert [tap.at for tap in made.needs.taps] == [2, 16, 29]
    assert made.kv == (KVLayers(layers=1, kv_heads=8, k_dim=128, v_dim=128, scratch_rows=2),)
    assert made.max_position == 2047
    found = read(facts, Eagle3Config())
    assert isinstance(found, Layout)
    assert found.sizes.rope.theta == 10000.0
    assert (found.rows, found.vocab) == (32000, 128256)


def test_deepseeks_head_for_qwen3_4b() -> None:
    """Five states in output notation, hidden 2560 with heads of 128 x 32, nothing borrowed that it ships."""
    norms = {f"layers.0.self_attn.{part}_norm.weight": (128,) for part in "qk"}
    tensors = published(
        "layers.0", 4096, 1024, 2560, 9728, 151936, 151936, 12800, **{"embed_tokens.weight": (151936, 2560), **norms}
    )
    config = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "rope_theta": 1000000,
    }
    qwen = {**CONFIG, "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936}
    draft = Checkpoint.model_validate({"path": "head", "config": config, "tensors": tensors})
    made = planned(facts=Facts(target=Checkpoint(path="target", config=qwen), draft=draft))
    assert [tap.at for tap in made.needs.taps] == [2, 10, 18, 26, 34]
    assert made.kv[0].k_dim == 128
    assert made.needs.borrows == frozenset()
    assert made.needs.vocab == "same"


# --- defaults --------------------------------------------------------------------------------------------------------

SHORT = {"num_steps": "s", "eagle_topk": "k", "num_draft_tokens": "n"}
GIVEN = {"num_steps": 4, "eagle_topk": 2, "num_draft_tokens": 6}
SUBSETS = [{key: GIVEN[key] for key in keys} for count in range(4) for keys in itertools.combinations(GIVEN, count)]
EXPECTED: dict[str, dict[str, tuple[int, int, int]]] = {
    # given -> settled (steps, branches, nodes)
    "LlamaForCausalLM": {
        "": (5, 4, 7),
        "s": (4, 4, 7),
        "k": (5, 2, 7),
        "n": (5, 4, 5),
        "sk": (4, 2, 7),
        "sn": (4, 4, 5),
        "kn": (5, 2, 5),
        "skn": (4, 2, 5),
    },
    "Qwen3ForCausalLM": {
        "": (3, 1, 3),
        "s": (4, 1, 4),
        "k": (5, 2, 7),
        "n": (5, 1, 5),
        "sk": (4, 2, 7),
        "sn": (4, 1, 4),
        "kn": (5, 2, 5),
        "skn": (4, 2, 5),
    },
}


def facts_for(architecture: str, head: Head) -> Facts:
    return facts_of(head, Checkpoint(path="target", config={**CONFIG, "architectures": [architecture]}))


@pytest.mark.parametrize("architecture", EXPECTED)
@pytest.mark.parametrize("given", SUBSETS, ids=lambda given: "".join(SHORT[key] for key in given) or "none")
def test_every_subset_of_the_three_is_legal(given: dict[str, int], architecture: str, settle: Any) -> None:
    run = settle("EAGLE-3", given, facts_for(architecture, official(head3())))
    config = run.config
    assert isinstance(config, Eagle3Config)
    assert run.plan is not None
    expected = EXPECTED[architecture]["".join(SHORT[key] for key in given)]
    assert (config.num_steps, config.eagle_topk, run.plan.nodes) == expected
    assert run.plan.depth == min(expected[0], expected[2])
    for key, value in given.items():
        assert getattr(config, key) == value, "what was given is not touched"


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 20, 64, 69, 70, 128, 256])
@pytest.mark.parametrize("more", [{}, {"eagle_topk": 4}, {"eagle_topk": 1}, {"num_steps": 2}, {"num_steps": 7}])
def test_defaults_fill_what_num_draft_tokens_asks_for(tokens: int, more: dict[str, int], settle: Any) -> None:
    run = settle("EAGLE-3", {"num_draft_tokens": tokens, **more}, facts_for("LlamaForCausalLM", head3(rows=64)))
    config, nodes = run.config, run.plan.nodes
    assert isinstance(config, Eagle3Config)
    chain = config.eagle_topk == 1
    assert nodes == min(tokens - 1, config.num_steps if chain else tokens - 1)
    if chain and "num_steps" not in more:
        assert nodes == min(tokens - 1, 64)


def test_a_default_path_is_no_longer_than_the_tree_has_nodes(settle: Any) -> None:
    run = settle("EAGLE-3", {"num_draft_tokens": 4}, facts_for("LlamaForCausalLM", official(head3())))
    assert (run.config.num_steps, run.config.eagle_topk, run.plan.nodes) == (3, 4, 3)
    assert not run.warnings


def test_defaults_are_explained(settle: Any) -> None:
    run = settle("EAGLE-3", {}, facts_for("LlamaForCausalLM", official(head3())))
    because = {setting.field: (setting.source, setting.because) for setting in run.settings}
    assert because["eagle_topk"] == ("algorithm", "specplug-eagle 0.1.0, the default of this target")
    assert because["num_steps"] == ("algorithm", "specplug-eagle 0.1.0, the default of trees")


def test_a_drawn_draft_is_a_chain_by_default(settle: Any) -> None:
    run = settle("EAGLE-3", {"draft_sampling": True}, facts_for("LlamaForCausalLM", official(head3())))
    assert isinstance(run.config, Eagle3Config)
    assert (run.config.num_steps, run.config.eagle_topk) == (3, 1)


def test_a_target_that_cannot_verify_trees_gets_a_chain(settle: Any) -> None:
    facts = facts_of(official(head3())).model_copy(update={"features": FEATURES - {"tree_verify"}})
    config = settle("eagle3", {}, facts).config
    assert isinstance(config, Eagle3Config)
    assert config.eagle_topk == 1


def test_speculators_names_its_draft_length(settle: Any) -> None:
    head = speculators(head3(ships_embed=True), steps=6)
    run = settle("EAGLE-3", {}, facts_for("LlamaForCausalLM", head))
    source = {setting.field: setting.source for setting in run.settings}
    assert isinstance(run.config, Eagle3Config)
    assert (run.config.num_steps, run.config.eagle_topk, source["num_steps"]) == (6, 1, "checkpoint")
    given = settle("EAGLE-3", {"num_draft_tokens": 3}, facts_for("LlamaForCausalLM", head)).config
    assert isinstance(given, Eagle3Config)
    assert given.num_steps == 2


def test_nothing_is_proposed_for_others() -> None:
    assert not specplug_defaults("standalone", {}, FACTS)
    assert not specplug_check("standalone", Eagle3Config(), planned(), FACTS)


# --- what works but is hardly meant -----------------------------------------------------------------------------------


def said(config: Mapping[str, Any], facts: Facts = FACTS) -> list[tuple[str, str, str]]:
    wanted = Eagle3Config(**config)
    made = plan(wanted, facts, None)
    assert isinstance(made, DraftPlan), made
    return [(each.severity, each.field, each.message) for each in specplug_check("eagle3", wanted, made, facts)]


def test_warnings() -> None:
    assert not said({})
    assert not said({"num_steps": 4, "num_draft_tokens": 5})
    assert not said({"num_steps": 4, "eagle_topk": 4, "num_draft_tokens": 12})
    for config in (
        {"num_steps": 4, "num_draft_tokens": 4},
        {"num_steps": 3, "num_draft_tokens": 9},
        {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 4},
    ):
        ((severity, field, message),) = said(config)
        assert (severity, field) == ("warning", "num_draft_tokens")
        assert "3 tokens are drafted" in message
    ((severity, field, message),) = said({}, facts_of(head3(boundaries=(3, 4, 6))))
    assert (severity, field) == ("warning", "eagle_aux_semantics")
    assert "[3, 4, 6], taken as inputs of these layers" in message
    assert not said({"eagle_aux_semantics": "boundary"}, facts_of(head3(boundaries=(3, 4, 6))))


def test_token_maps_are_read_before_weights(tmp_path: Path) -> None:
    facts = facts_of(head3(rows=64))
    few = tmp_path / "few.txt"
    few.write_text("1 2 3", encoding="utf-8")
    assert not said({"eagle_token_map": str(few)}, facts)
    assert planned({"eagle_token_map": str(few)}, facts).needs.vocab == "mapped"
    wide = {"eagle_token_map": str(few), "eagle_topk": 4}
    assert "fewer tokens than eagle_topk 4" in said(wide, facts)[0][2]
    half = tmp_path / "half.pt"
    torch.save(torch.tensor([0.5]), half)
    for name, text, expected in (
        ("a.txt", "", "holds no token id"),
        ("b.txt", "1 64", "64 is no token of the target, which has the ids 0 to 63"),
        ("c.json", "[1, -1]", "-1 is no token"),
        ("d.json", "[1, 2, 1]", "id 1 twice"),
        ("e.json", '{"ids": [1]}', "a JSON dict; a list of token ids"),
        ("f.txt", "one", "cannot be read as a list of token ids"),
        ("g.pt", "no torch file", "cannot be read as a list of token ids"),
        ("half.pt", None, "cannot be read as a list of token ids"),
        ("h.csv", "1", "ending in .pt, .json, .txt"),
        ("j.json", '["1"]', "'1' is no token"),
        ("missing.pt", None, "no such file"),
    ):
        file = tmp_path / name
        if text is not None:
            file.write_text(text, encoding="utf-8")
        ((severity, field, message),) = said({"eagle_token_map": str(file)}, facts)
        assert (severity, field) == ("error", "eagle_token_map")
        assert expected in message, message
        assert "\n" not in message
