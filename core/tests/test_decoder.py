"""The decoder computes what transformers computes, from the same files; weights are loaded whole or not at all."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specplug.errors import UserError
from specplug.facts import read_checkpoint
from specplug.models.base import ForwardBatch, KVGeometry
from specplug.models.decoder import Decoder
from specplug.models.family import decoder_config
from specplug.models.target import Target, load_target
from specplug.models.weights import fill_module, iterate_weights
from specplug.spec import TapRequest

LENGTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
# Wavelengths on both sides of both bounds, so that each branch of the scaling is taken.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
FLAGGED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-tied-linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "llama-biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2ForCausalLM, Qwen2Config, FLAGGED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


class Dense:
    """Attention of one whole row from position 0, no cache."""

    def __init__(self, layers: tuple[KVGeometry, ...]) -> None:
        self.layers = layers

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        assert k is not None
        assert v is not None
        assert (k.shape[1], k.shape[2]) == (self.layers[layer].kv_heads, self.layers[layer].k_dim)
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * (scale or q.shape[-1] ** -0.5)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
        window = self.layers[layer].window
        hidden = (distance < 0) | (distance >= (window or len(k)))
        return torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(groups, 1)
        )


def checkpoint(folder: Path, case: str, **changes: Any) -> PreTrainedModel:
    model, config, extra = CASES[case]
    torch.manual_seed(5)
    reference = model(config(**SIZES | extra | changes)).eval()
    with torch.no_grad():
        for name, tensor in reference.named_parameters():
            # Fresh biases are zero and fresh norms one: a decoder that skipped them would pass.
            if name.endswith("bias") or "norm" in name:
                tensor.normal_(1.0, 0.3)
    reference.save_pretrained(folder)
    return reference


def load(folder: Path, **options: Any) -> Target:
    facts = read_checkpoint(str(folder))
    return load_target(folder, facts, dtype="float32", device="cpu", needs_tokenizer=False, **options)


def run(target: Target, tokens: Tensor, *taps: int | str) -> tuple[Tensor, tuple[Tensor, ...]]:
    asked = tuple(TapRequest(at=at) for at in taps)
    batch = ForwardBatch(tokens, torch.arange(len(tokens)), Dense(target.model.kv_layers), asked)
    with torch.inference_mode():
        hidden, states = target.model(batch)
        return target.model.logits(hidden), states


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(case: str, tmp_path: Path, tokens: Tensor) -> None:
    reference = checkpoint(tmp_path, case)
    ours, taps = run(load(tmp_path), tokens, 2, "final_norm", 0, 3, 1)
    states: list[Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda module, given: states.append(given[0]))
    with torch.inference_mode():
        theirs = reference(tokens[None], output_hidden_states=True)
    torch.testing.assert_close(ours, theirs.logits[0], atol=2e-5, rtol=1e-5)
    assert torch.equal(ours.argmax(-1), theirs.logits[0].argmax(-1))
    named = theirs.hidden_states
    # The last entry of transformers' hidden states is normed; boundary n is not.
    for tap, expected in zip(taps, (named[2], named[3], named[0], states[0], named[1]), strict=True):
        torch.testing.assert_close(tap, expected[0], atol=5e-5, rtol=1e-5)


def test_windows_are_geometry() -> None:
    def windows(case: str) -> tuple[int | None, ...]:
        _, config, extra = CASES[case]
        given = config(**SIZES | extra).to_dict() | {"architectures": [CASES[case][0].__name__]}
        return tuple(layer.window for layer in Decoder(given, device="meta").kv_layers)

    assert windows("mistral") == (7, 7, 7)
    assert windows("qwen2-window") == (None, 5, 5)
    assert windows("qwen2") == windows("llama") == (None, None, None)


def test_old_spelling_of_rotary_scaling(tmp_path: Path, tokens: Tensor) -> None:
    checkpoint(tmp_path, "llama")
    expected, _ = run(load(tmp_path), tokens)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = dict(config.pop("rope_parameters"))
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    file.write_text(json.dumps(config))
    assert torch.equal(run(load(tmp_path), tokens)[0], expected)


def test_tied_head_is_one_tensor_and_parts_are_shared(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen2")
    model = load(tmp_path).model
    assert model.part("lm_head").weight is model.part("embed_tokens").weight
    cos, sin = model.part("rope")(torch.tensor([0, 63]))
    assert cos.shape == sin.shape == (2, 1, 4)
    assert cos[0].eq(1).all()
    with pytest.raises(KeyError, match="lm_head"):
        model.part("layers")


def test_heads_that_differ_are_not_tied(tmp_path: Path, tokens: Tensor) -> None:
    reference = checkpoint(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    with torch.inference_mode():
        torch.testing.assert_close(
            run(load(tmp_path), tokens)[0], reference(tokens[None]).logits[0], atol=2e-5, rtol=1e-5
        )


def test_max_position_bounds_the_table(tmp_path: Path, tokens: Tensor) -> None:
    checkpoint(tmp_path, "llama")
    target = load(tmp_path, max_position=LENGTH)
    assert target.model.max_position == LENGTH
    run(target, tokens)
    with pytest.raises(IndexError):
        run(target, tokens.repeat(2))


def test_unknown_tap_is_refused(tmp_path: Path, tokens: Tensor) -> None:
    checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match="boundaries 0 to 3"):
        run(load(tmp_path), tokens, 4)


def test_sharded_and_bin_files_give_the_same_model(tmp_path: Path, tokens: Tensor) -> None:
    reference = checkpoint(tmp_path / "one", "llama")
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    binary = tmp_path / "bin"
    binary.mkdir()
    (binary / "config.json").write_text((tmp_path / "one/config.json").read_text())
    torch.save(reference.state_dict(), binary / "pytorch_model.bin")
    expected, _ = run(load(tmp_path / "one"), tokens)
    assert torch.equal(run(load(tmp_path / "many"), tokens)[0], expected)
    assert torch.equal(run(load(binary), tokens)[0], expected)
    assert read_checkpoint(str(binary)).tensors == read_checkpoint(str(tmp_path / "one")).tensors


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Add, replace or (None) drop stored tensors; ``__`` in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items() if tensor is not None}
    gone = {name.replace("__", ".") for name, tensor in changes.items() if tensor is None}
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model__layers__1__self_attn__k_proj__weight": None}, "1 missing: layers.1.self_attn.k_proj.weight"),
        ({"lm_head__weight": None}, "1 missing: lm_head.weight"),
        ({"model__layers__0__self_attn__q_proj__weight_scale": torch.ones(1)}, "1 unexpected: model.layers.0"),
        ({"model__layers__0__mlp__gate_proj__bias": torch.ones(48)}, "1 unexpected: model.layers.0.mlp.gate_proj.bias"),
        ({"model__norm__bias": torch.ones(32)}, "1 unexpected: model.norm.bias"),
        ({"model__norm__weight": torch.ones(31)}, r"model.norm.weight \[31\] for \[32\]"),
        ({"model__norm__weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight int8 for float32"),
        ({"norm__weight": torch.ones(32)}, "1 stored twice: norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    edit(tmp_path, **change)
    with pytest.raises(UserError, match=told) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_foreign_tensors_are_left_unread_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path, "qwen2")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["MiMoForCausalLM"]}
    file.write_text(json.dumps(config))
    extra = {
        "model.layers.3.input_layernorm.weight": torch.ones(32),
        "model.layers.3.mlp.up_proj.weight": torch.ones(48, 32),
        "model.mtp_layers.0.final_layernorm.weight": torch.ones(32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    edit(tmp_path, **extra)
    with caplog.at_level(logging.WARNING, logger="specplug"):
        load(tmp_path)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "2 tensors under model.layers.3*" in told[0]
    assert "1 tensors under model.mtp_layers*" in told[1]
    # Drafters find them; and for them nothing may be left over.
    assert dict(iterate_weights(tmp_path, "model.mtp_layers.")).keys() == {"model.mtp_layers.0.final_layernorm.weight"}
    with pytest.raises(UserError, match=r"unexpected: model.layers.0.self_attn.rotary_emb.inv_freq, model.layers.3"):
        fill_module(Decoder(config), tmp_path, lambda name: name.removeprefix("model."), strict=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*supported rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "without 'low_freq_factor'"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_config_beyond_the_decoder_is_refused(change: dict[str, Any], told: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES}
    decoder_config(config)
    with pytest.raises(UserError, match=told):
        decoder_config(config | change)


def test_what_ends_an_answer(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama", eos_token_id=5)
    assert load(tmp_path).eos_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load(tmp_path).eos_ids == (7, 9)


def test_missing_tokenizer_is_refused_unless_allowed(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    assert load(tmp_path).tokenizer is None
    with pytest.raises(UserError, match="lacks a tokenizer"):
        load_target(tmp_path, read_checkpoint(str(tmp_path)), dtype=torch.float32, device="cpu")
