"""Decoder layers of transformers, one by one: they compute what the whole model does, and load by stored names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specplug import UserError, draft_blocks
from specplug.models.base import KVGeometry
from specplug.models.weights import destinations
from specplug.testing.targets import DenseAttention

COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "model_type": "llama"},
    "glm4_moe": {**COMMON, **EXPERTS, "model_type": "glm4_moe", "head_dim": 8, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {
        **COMMON,
        **EXPERTS,
        "model_type": "deepseek_v3",
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
}
DIMS = {"llama": (8, 8), "glm4_moe": (8, 8), "deepseek_v3": (10, 8)}


def blocks(config: dict[str, Any]) -> Any:
    return draft_blocks(config, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_in_a_row_are_the_model(kind: str) -> None:
    config = CONFIGS[kind]
    torch.manual_seed(1)
    named = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **named)).eval()
    k_dim, v_dim = DIMS[kind]
    attention = DenseAttention([KVGeometry(2, k_dim, v_dim)] * 2)
    ids, positions = torch.tensor([3, 1, 4, 1, 5, 9]), torch.arange(6)
    made = blocks(config)
    with torch.inference_mode():
        x = model.model.embed_tokens(ids)
        for block, layer in zip(made, model.model.layers, strict=True):
            block.layer.load_state_dict(layer.state_dict())
            x = block(x, positions, attention)
        wanted = model.model(input_ids=ids[None]).last_hidden_state[0]
        torch.testing.assert_close(model.model.norm(x), wanted, rtol=1e-4, atol=1e-5)


def test_experts_are_filled_one_by_one() -> None:
    """`stored` shares storage with the block, under the names of published checkpoints; norms and biases come along."""
    block = blocks(CONFIGS["glm4_moe"])[1]
    slots = destinations(block.stored())
    assert {"input_layernorm.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"} <= slots.keys()
    assert sum(name.startswith("mlp.experts.") for name in slots) == 3 * 4
    experts = block.layer.mlp.experts
    for number in range(4):
        for at, part in enumerate(("gate_proj", "up_proj", "down_proj")):
            slots[f"mlp.experts.{number}.{part}.weight"].fill_(10 * number + at)
        assert experts.gate_up_proj[number, :8].eq(10 * number).all()
        assert experts.gate_up_proj[number, 8:].eq(10 * number + 1).all()
        assert experts.down_proj[number].eq(10 * number + 2).all()
    stacked = destinations(block.stored(stacked_experts=True))
    assert stacked["mlp.experts.gate_up_proj"].data_ptr() == experts.gate_up_proj.data_ptr()


def test_dense_layers_have_no_experts() -> None:
    assert "mlp.gate_proj.weight" in destinations(blocks(CONFIGS["deepseek_v3"])[0].stored())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**COMMON, "model_type": "nothing_like_it"}, "nothing_like_it"),
        (COMMON, "none named"),
        ({**COMMON, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 2}, "asks its attention for s_aux"),
    ],
)
def test_what_cannot_be_run_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as told:
        blocks(config)
    assert "\n" not in str(told.value)
