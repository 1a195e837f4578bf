"""The manifest: options, plans, defaults and refusals."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mtp_checkpoints import DEEPSEEK, GLM, QWEN
from pydantic import ValidationError

from specplug import API, Checkpoint, DraftPlan, Facts, KVLayers, Limits, Refusal, TapRequest
from specplug.testing.targets import decoder_config
from specplug.testing.tokenizer import byte_tokenizer
from specplug_mtp.builtin_layout import KNOWN
from specplug_mtp.builtin_plan import SPEC, defaults, objections, plan
from specplug_mtp.config import BuiltinMtpConfig
from specplug_mtp.plugin import specplug_algorithms, specplug_check, specplug_defaults

H = 32
MIMO = {**decoder_config(64), "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
FEATURES = frozenset({"own_kv", "rollback", "taps", "borrow:embed_tokens", "borrow:lm_head"})
FASTMTP = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
DEEPSEEK_NAMES = ("enorm", "hnorm", "shared_head.norm", "eh_proj")


def headers(*roots: str, names: tuple[str, ...] = FASTMTP) -> dict[str, Any]:
    """Return the headers of one head under each of `roots`; the last name is the projection."""
    return {
        f"{root}{name}.weight": ("float32", (H, 2 * H) if name == names[-1] else (H,))
        for root in roots
        for name in names
    }


def mimo(heads: int = 1, **changes: Any) -> Facts:
    tensors = headers(*(f"model.mtp_layers.{at}." for at in range(heads)))
    config = {**MIMO, "num_nextn_predict_layers": heads, **changes}
    return Facts(target=Checkpoint(path="target", config=config, tensors=tensors), features=FEATURES)


def draft_of(config: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None) -> Facts:
    """Facts of a Llama target and a speculators draft."""
    stated = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": {**decoder_config(64), "model_type": "llama"},
    }
    draft = Checkpoint(path="draft", config={**stated, **(config or {})}, tensors=tensors or headers("mtp_layers.0."))
    return Facts(
        target=Checkpoint(path="target", config=decoder_config(64), tensors={}), draft=draft, features=FEATURES
    )


def numbered(config: Mapping[str, Any], heads: int = 1, **facts: Any) -> Facts:
    roots = [f"model.layers.{config['num_hidden_layers'] + at}." for at in range(heads)]
    tensors = headers(*roots, names=DEEPSEEK_NAMES)
    target = Checkpoint(path="target", config={**config, "num_nextn_predict_layers": heads}, tensors=tensors)
    return Facts(target=target, features=FEATURES, **facts)


def planned(config: dict[str, Any], facts: Facts, depth: int | None = None) -> DraftPlan:
    made = plan(BuiltinMtpConfig(**config), facts, depth)
    assert isinstance(made, DraftPlan), made
    return made


def refused(config: dict[str, Any], facts: Facts) -> Refusal:
    answer = plan(BuiltinMtpConfig(**config), facts, None)
    assert isinstance(answer, Refusal), answer
    assert answer.try_instead
    assert "\n" not in answer.reason + answer.try_instead
    return answer


def test_manifest_leaves_torch_unimported() -> None:
    code = "import sys, specplug_mtp.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_manifest_offers_both_for_this_api() -> None:
    assert [spec.name for spec in specplug_algorithms()] == ["builtin-mtp", "frozen-kv-mtp"]
    assert SPEC.aliases == ("nextn",)
    assert SPEC.api[0] == API[0]
    assert SPEC.api <= API


def test_documented_defaults() -> None:
    assert BuiltinMtpConfig().model_dump() == {
        "num_draft_tokens": None,
        "num_steps": 3,
        "eagle_topk": 1,
        "draft_sampling": False,
        "mtp_multi_layer": False,
        "mtp_depth_input": "auto",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_draft_tokens", 66), ("num_steps", 0), ("num_steps", 65), ("eagle_topk", 0), ("mtp_depth_input", "both")],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        BuiltinMtpConfig.model_validate({field: value})


@pytest.mark.parametrize(
    ("config", "depth", "nodes"),
    [
        ({}, None, 3),
        ({}, 2, 2),
        ({}, 0, 0),
        ({}, 9, 3),
        ({"num_draft_tokens": 3}, None, 2),
        ({"num_draft_tokens": 9}, None, 3),
        ({"num_draft_tokens": 1}, None, 0),
        ({"num_steps": 5, "num_draft_tokens": 4}, None, 3),
    ],
)
def test_one_head_keeps_a_row_for_each_step_but_the_first(
    config: dict[str, Any], depth: int | None, nodes: int
) -> None:
    made = planned(config, mimo(), depth)
    assert (made.nodes, made.depth, made.lookahead) == (nodes, nodes, 1)
    assert made.kv == (KVLayers(layers=1, kv_heads=2, k_dim=8, v_dim=8, scratch_rows=max(nodes - 1, 0)),)
    assert made.bytes_per_slot == H * 4
    assert made.needs.taps == (TapRequest(at="final_norm"),)
    assert made.needs.borrows == {"embed_tokens", "lm_head"}
    assert not made.needs.exceeding(SPEC.capabilities)


def test_a_head_for_each_step_keeps_its_own_kv_and_nothing_above_the_root() -> None:
    made = planned({"mtp_multi_layer": True}, mimo(3))
    assert made.kv == (KVLayers(layers=3, kv_heads=2, k_dim=8, v_dim=8, scratch_rows=0),)
    assert made.bytes_per_slot == 3 * H * 4
    assert planned({"mtp_multi_layer": False}, mimo(3)).kv[0].layers == 1


@pytest.mark.parametrize(
    ("facts", "kv"),
    [
        (numbered(GLM), KVLayers(layers=1, kv_heads=2, k_dim=8, v_dim=8, scratch_rows=2)),
        (numbered(DEEPSEEK), KVLayers(layers=1, kv_heads=4, k_dim=12, v_dim=6, scratch_rows=2)),
        (draft_of(), KVLayers(layers=1, kv_heads=2, k_dim=8, v_dim=8, scratch_rows=2)),
        (mimo(use_sliding_window=True, sliding_window=16, max_window_layers=0), None),
    ],
)
def test_kv_is_the_blocks(facts: Facts, kv: KVLayers | None) -> None:
    made = planned({}, facts)
    assert made.kv == ((kv,) if kv else (KVLayers(layers=1, kv_heads=2, k_dim=8, v_dim=8, window=16, scratch_rows=2),))


def test_only_plain_blocks_are_recorded() -> None:
    """Experts ask for numbers on their way."""
    assert planned({}, mimo()).needs.graph_safe
    assert not planned({}, numbered(GLM)).needs.graph_safe


def test_a_plan_ends_with_the_heads_window() -> None:
    facts = draft_of(
        {"transformer_layer_config": {**decoder_config(64), "model_type": "llama", "max_position_embeddings": 99}}
    )
    assert planned({}, facts).max_position == 98
    assert planned({}, facts.model_copy(update={"limits": Limits(context_length=99)})).max_position is None
    assert planned({}, mimo()).max_position is None


def test_without_files_the_config_decides() -> None:
    unread = mimo(2).model_copy(update={"target": mimo(2).target.model_copy(update={"tensors": None})})
    assert planned({"mtp_multi_layer": True, "num_steps": 2}, unread).kv[0].layers == 2
    plain = Facts(target=Checkpoint(config=decoder_config(64), tensors=None), features=FEATURES)
    assert "no MTP layers" in refused({}, plain).reason


WIDER = {**decoder_config(64), "model_type": "llama", "hidden_size": 48}


@pytest.mark.parametrize(
    ("config", "facts", "named", "way_out"),
    [
        ({"eagle_topk": 4}, mimo(), "eagle_topk 4", "topk 1"),
        ({}, Facts.empty(), "neither its tensors nor its config.json", "MTP draft"),
        (
            {},
            mimo().model_copy(update={"target": Checkpoint(config=MIMO, tensors={})}),
            "speaks of 1, but",
            "MTP draft",
        ),
        ({"mtp_multi_layer": True}, mimo(), "holds 1", "--no-speculative-mtp-multi-layer"),
        ({"mtp_multi_layer": True, "num_steps": 4}, mimo(3), "num_steps 4 is more than the 3", "num-steps 3"),
        ({"mtp_depth_input": "target"}, mimo(3), "mtp_depth_input target", "--speculative-mtp-multi-layer"),
        ({}, mimo(hidden_size=None), "hidden_size = None", "config.json"),
        ({}, mimo(rope_scaling={"type": "yarn"}, rope_parameters=None), "yarn", "config.json"),
        ({}, draft_of({"transformer_layer_config": {"model_type": "qwen3_next"}}), "'qwen3_next'", "such a target"),
        ({}, draft_of({"transformer_layer_config": WIDER}), "hidden_size 48, the target 32", "for this target"),
        ({}, draft_of({"num_nextn_predict_layers": 2}), "num_nextn_predict_layers 2", "one MTP layer"),
        ({}, draft_of({"speculators_model_type": "eagle3"}, {"fc.weight": ("f", (1,))}), "holds no MTP", "eagle"),
        (
            {},
            draft_of(tensors={**headers("mtp_layers.0."), "fc.weight": ("f", (1,))}),
            "fc.weight belongs to no",
            "copy",
        ),
        (
            {},
            draft_of(tensors=headers("mtp_layers.0.", names=FASTMTP[1:])),
            "token_layernorm.weight is missing",
            "copy",
        ),
    ],
)
def test_refusals_name_the_cause_and_the_way_out(
    config: dict[str, Any], facts: Facts, named: str, way_out: str
) -> None:
    answer = refused(config, facts)
    assert named in answer.reason
    assert way_out in answer.try_instead


def test_another_tokenizer_and_quantized_weights_are_refused() -> None:
    other = draft_of().model_copy(update={"first_vocab_difference": (7, "seven", "sept")})
    assert "id 7 is 'seven' in the target's and 'sept' in the draft's" in refused({}, other).reason
    answer = refused({}, draft_of({"quantization_config": {"quant_method": "fp8"}}))
    assert "quantized with 'fp8'" in answer.reason


def test_a_projection_of_another_width_is_refused() -> None:
    tensors = {**headers("mtp_layers.0."), "mtp_layers.0.input_proj.weight": ("float32", (H, H))}
    assert "input_proj.weight is [32, 32], not [32, 64]" in refused({}, draft_of(tensors=tensors)).reason


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_latent_attention_is_refused_on_cuda(device: str) -> None:
    assert planned({}, numbered(DEEPSEEK)).nodes == 3
    answer = refused({}, numbered(DEEPSEEK, device=device))
    assert "keys of 12 and values of 6" in answer.reason
    assert device in answer.reason
    assert planned({}, numbered(GLM, device=device)).nodes == 3


@pytest.mark.parametrize("start", KNOWN)
@pytest.mark.parametrize(
    "stored", ["model.layers.2.eh_proj.weight", "model.mtp.layers.0.enorm.weight", "mtp.0.e_proj.weight", None]
)
def test_known_families_are_refused_by_name(start: str, stored: str | None) -> None:
    config = {**decoder_config(64), "architectures": [f"{start}ForCausalLM"], "num_nextn_predict_layers": 1}
    tensors = {} if stored is None else {stored: ("float32", (1,))}
    answer = refused({}, Facts(target=Checkpoint(config=config, tensors=tensors), features=FEATURES))
    assert KNOWN[start] in answer.reason
    assert f"{start}ForCausalLM" in answer.reason
    assert "not run by this version" in answer.reason


def test_unknown_families_with_known_names_are_refused_by_architecture() -> None:
    config = {**decoder_config(64), "architectures": ["NewForCausalLM"]}
    tensors = headers("model.layers.2.", names=DEEPSEEK_NAMES)
    assert "NewForCausalLM" in refused({}, Facts(target=Checkpoint(config=config, tensors=tensors))).reason


def test_several_qwen_layers_are_refused() -> None:
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    tensors = {**headers("mtp.", names=names), "mtp.layers.1.input_layernorm.weight": ("float32", (H,))}
    assert "several mtp.layers" in refused({}, Facts(target=Checkpoint(config=QWEN, tensors=tensors))).reason


@pytest.mark.parametrize(
    ("given", "facts", "values"),
    [
        ({}, mimo(), None),
        ({"num_draft_tokens": 6}, mimo(), {"num_steps": 5}),
        ({"num_draft_tokens": 6, "num_steps": 2}, mimo(), None),
        ({"num_draft_tokens": 1}, mimo(), None),
        ({}, mimo(2), {"mtp_multi_layer": True, "num_steps": 2}),
        ({"num_steps": 1}, mimo(2), {"mtp_multi_layer": True}),
        ({"num_steps": 5}, mimo(2), None),
        ({"num_draft_tokens": 2}, mimo(2), {"mtp_multi_layer": True, "num_steps": 1}),
        ({"mtp_multi_layer": False}, mimo(2), None),
        ({"mtp_multi_layer": True}, mimo(4), {"num_steps": 4}),
        ({}, Facts.empty(), None),
        (
            {},
            draft_of({"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}),
            {"num_steps": 5},
        ),
        (
            {"num_draft_tokens": 3},
            draft_of({"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}),
            {"num_steps": 2},
        ),
    ],
)
def test_defaults(given: dict[str, Any], facts: Facts, values: dict[str, Any] | None) -> None:
    offered = defaults(given, facts)
    assert (offered and offered.values) == values
    assert specplug_defaults("builtin-mtp", given, facts) == offered
    assert specplug_defaults("eagle", given, facts) is None


def test_what_is_hardly_meant_is_said() -> None:
    def said(config: dict[str, Any], facts: Facts) -> list[str]:
        return [problem.message for problem in objections(BuiltinMtpConfig(**config), facts)]

    assert not said({}, mimo())
    assert "3 tokens are drafted" in said({"num_draft_tokens": 9}, mimo())[0]
    assert "1 more that are stored do not" in said({}, mimo(2))[0]
    assert not said({"mtp_multi_layer": True, "num_steps": 2}, mimo(2))
    own = mimo().model_copy(update={"draft": mimo().target})
    assert "is the target's own" in said({}, own)[0]
    assert planned({}, own).kv == planned({}, mimo()).kv
    made = planned({}, mimo())
    assert not specplug_check("other", BuiltinMtpConfig(num_draft_tokens=9), made, mimo())


# --- the line of the issue ------------------------------------------------------------------------------------------


def mimo_7b(folder: Path) -> None:
    """Write MiMo-7B-RL's config and the headers of its weights: the file's data is a hole."""
    hidden, inner, vocab, keys, layers = 4096, 11008, 151680, 1024, 36
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    for at in [*(f"model.layers.{layer}." for layer in range(layers)), "model.mtp_layers.0."]:
        shapes |= {at + name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {at + f"self_attn.{part}_proj": (hidden, hidden) for part in "qo"}
        shapes |= {at + f"self_attn.{part}_proj": (keys, hidden) for part in "kv"}
        shapes |= {at + "mlp.gate_proj": (inner, hidden), at + "mlp.up_proj": (inner, hidden)}
        shapes |= {at + "mlp.down_proj": (hidden, inner)}
    shapes |= {f"model.mtp_layers.0.{name}": (hidden,) for name in FASTMTP[:-1]}
    shapes["model.mtp_layers.0.input_proj"] = (hidden, 2 * hidden)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for dimension in shape:
            size *= dimension
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    byte_tokenizer().save_pretrained(str(folder))


@pytest.mark.parametrize("word", ["EAGLE", "NEXTN"])
def test_mimo_7b_plans_as_sglangs_users_write_it(tmp_path: Path, word: str) -> None:
    mimo_7b(tmp_path / "XiaomiMiMo" / "MiMo-7B-RL")
    words = f"doctor {word} XiaomiMiMo/MiMo-7B-RL --trust-remote-code --speculative-num-steps 1 "
    words += "--speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --json --device cuda"
    command = [sys.executable, "-m", "specplug", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["algorithm"], report["distribution"]) == ("builtin-mtp", "specplug-mtp")
    assert (report["plan"]["nodes"], report["plan"]["kv"][0]["kv_heads"]) == (1, 8)
    assert any("specplug-mtp 0.1.0 says 'builtin-mtp'" in line for line in report["trace"])


def test_mimo_7b_would_be_served(tmp_path: Path) -> None:
    """The command line of MiMo's users, word for word."""
    mimo_7b(tmp_path / "XiaomiMiMo" / "MiMo-7B-RL")
    words = "serve XiaomiMiMo/MiMo-7B-RL --trust-remote-code --speculative-algorithm EAGLE --speculative-num-steps 1 "
    words += "--speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --dry-run"
    command = [sys.executable, "-m", "specplug", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "builtin-mtp" in done.stdout
    assert "plan: 1 drafts of depth 1" in done.stdout
