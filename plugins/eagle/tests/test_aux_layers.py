"""Layer ids in every notation, and the states of the target that they stand for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head, eagle1, eagle3, modelopt, speculators
from safetensors.torch import load_file, save_file
from torch import Tensor

from specplug import Engine, SamplingParams
from specplug.testing.targets import decoder_config
from specplug.testing.tokenizer import SIZE, byte_tokenizer
from specplug_eagle.aux_layers import own_semantics, resolve, stated
from specplug_eagle.heads import Head as HeadModule

IDS = "eagle_aux_hidden_state_layer_ids"


def nested(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {IDS: list(ids)}}


def top(*ids: int) -> dict[str, Any]:
    return {IDS: list(ids)}


def enveloped(*ids: int) -> dict[str, Any]:
    return {"speculators_model_type": "eagle3", IDS: list(ids)}


@pytest.mark.parametrize(
    ("config", "layers", "expected"),
    [
        # The three usual states, unnamed and in both notations, wherever they stand.
        ({}, 32, (2, 16, 29)),
        ({}, 61, (2, 30, 58)),
        (nested(1, 15, 28), 32, (2, 16, 29)),
        (top(1, 15, 28), 32, (2, 16, 29)),
        (top(2, 16, 29), 32, (2, 16, 29)),
        (nested(2, 30, 58), 61, (2, 30, 58)),  # Kimi-K2: nested, in the numbers of boundaries
        # The last boundary is no layer's number.
        (nested(24, 30, 36), 36, (24, 30, 36)),  # gpt-oss-120b-Eagle3-v3
        (top(24, 30, 36), 36, (24, 30, 36)),
        # long-context: the usual outputs; SpecForge's gpt-oss-120B only begins with 1.
        (nested(1, 17, 32), 36, (2, 18, 33)),
        (nested(1, 17, 33), 36, (2, 18, 34)),
        (top(1, 17, 33), 36, (2, 18, 34)),
        # Neither: the place decides.
        (nested(4, 20, 40), 45, (5, 21, 41)),
        (top(4, 20, 40), 45, (4, 20, 40)),
        # speculators always counts boundaries, target_layer_ids always outputs.
        (enveloped(1, 15, 28), 32, (1, 15, 28)),
        (enveloped(2, 30, 57), 60, (2, 30, 57)),
        ({"speculators_model_type": "eagle3", IDS: None}, 32, (2, 16, 29)),
        ({"target_layer_ids": [1, 9, 17, 25, 33]}, 36, (2, 10, 18, 26, 34)),  # eagle3_qwen3_4b_ttt7
        ({"target_layer_ids": [-1, 15, 31]}, 32, (0, 16, 32)),  # -1: the embeddings
        # The order of the file is the order of fc's columns.
        (top(29, 2, 16), 32, (29, 2, 16)),
        # Two places: the top level wins, as in vLLM.
        ({**nested(1, 15, 28), **top(4, 20, 28)}, 32, (4, 20, 28)),
        # The checkpoint says so itself.
        ({**nested(4, 20, 40), "eagle_aux_layer_semantics": "vllm"}, 45, (4, 20, 40)),
        ({**top(4, 20, 40), "eagle_aux_layer_semantics": "sglang"}, 45, (5, 21, 41)),
    ],
)
def test_every_notation(config: Mapping[str, Any], layers: int, expected: tuple[int, ...]) -> None:
    assert resolve(config, layers, len(expected)).at == expected


def test_both_notations_of_the_usual_states_agree_at_every_depth() -> None:
    for layers in range(6, 100):
        usual = resolve({}, layers, 3).at
        outputs = [at - 1 for at in usual]
        assert resolve(nested(*outputs), layers, 3).at == usual
        assert resolve(top(*usual), layers, 3).at == usual


def test_the_user_overrides() -> None:
    assert resolve(nested(1, 15, 28), 32, 3, given=(0, 5, 32)).at == (0, 5, 32)
    assert resolve(nested(1, 15, 28), 32, 3, semantics="boundary").at == (1, 15, 28)
    assert resolve(enveloped(2, 16, 29), 32, 3, semantics="output").at == (3, 17, 30)
    own = {**nested(4, 20, 28), "eagle_aux_layer_semantics": "vllm"}
    assert resolve(own, 32, 3, semantics="output").at == (5, 21, 29)


def test_only_a_guess_is_called_one() -> None:
    assert resolve(nested(4, 20, 40), 45, 3).guessed
    assert "by the place" in resolve(nested(4, 20, 40), 45, 3).because
    assert "the usual layers 1, n/2-1 and n-4" in resolve(nested(1, 15, 28), 32, 3).because
    assert "the first is 1" in resolve(nested(1, 15, 29), 32, 3).because
    for sure in (nested(1, 15, 28), top(2, 16, 29), nested(24, 30, 32), nested(1, 2, 3), {}, enveloped(4, 5, 6)):
        assert not resolve(sure, 32, 3).guessed
    assert not resolve(nested(4, 20, 40), 45, 3, semantics="output").guessed


@pytest.mark.parametrize(
    ("config", "layers", "count", "given", "said"),
    [
        (top(2, 16), 32, 3, None, "these are 2 states, and the head's fc joins 3"),
        ({}, 32, 5, None, "joins 5 states and its config.json names no layers; give 5 in"),
        ({}, 2, 3, None, "boundary -1, and the target of 2 layers has 0 to 2"),
        (top(2, 16, 33), 32, 3, None, "boundary 33"),
        (top(-1, 16, 30), 32, 3, None, "boundary -1"),
        ({"target_layer_ids": [-2, 1, 2]}, 32, 3, None, "boundary -1"),
        ({}, 32, 3, (1, 2), "1,2: these are 2"),
        ({}, 32, 3, (1, 2, 40), "1,2,40: that is boundary 40"),
        (top(), 32, 3, None, "[], a list of layer numbers"),
        ({IDS: "2,16,29"}, 32, 3, None, "a list of layer numbers"),
        ({IDS: [2, True, 29]}, 32, 3, None, "a list of layer numbers"),
        ({**top(4, 5, 6), "eagle_aux_layer_semantics": "llm"}, 32, 3, None, "known are vllm and sglang"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    config: Mapping[str, Any], layers: int, count: int, given: Sequence[int] | None, said: str
) -> None:
    with pytest.raises(ValueError) as told:
        resolve(config, layers, count, given)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_nothing_stated() -> None:
    assert stated({}) is None
    assert own_semantics({}) is None


# --- capture ---------------------------------------------------------------------------------------------------------

LAYERS = 8
TEXT = (5, 9, 2)


@pytest.fixture(scope="module")
def adding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 8 layers that each add 1 to every channel: boundary k is the embedding plus k."""
    config = {**decoder_config(SIZE), "num_hidden_layers": LAYERS, "mlp_bias": True}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    weights = {
        "model.embed_tokens.weight": torch.randn(SIZE, hidden, generator=torch.Generator().manual_seed(0)),
        "model.norm.weight": torch.full((hidden,), 3.0),
        "lm_head.weight": torch.ones(SIZE, hidden),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {f"{at}{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
        for name, shape in (("q", (32, hidden)), ("k", (16, hidden)), ("v", (16, hidden)), ("o", (hidden, 32))):
            weights[f"{at}self_attn.{name}_proj.weight"] = torch.zeros(shape)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            weights[f"{at}mlp.{name}_proj.weight"] = torch.zeros(rows, columns)
            weights[f"{at}mlp.{name}_proj.bias"] = torch.full((rows,), float(name == "down"))
    folder: Path = tmp_path_factory.mktemp("adding")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, str(folder / "model.safetensors"))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
def captured(adding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``captured(head, algorithm)``: what the head is given to join, for a prompt; and its embeddings."""
    seen: list[tuple[Tensor, ...]] = []
    project = HeadModule.project

    def watched(self: HeadModule, taps: tuple[Tensor, ...]) -> Tensor:
        seen.append(tuple(tap.clone() for tap in taps))
        return project(self, taps)

    monkeypatch.setattr(HeadModule, "project", watched)

    def capture(head: Head, algorithm: str = "eagle3") -> tuple[tuple[Tensor, ...], Tensor]:
        options = {"algorithm": algorithm, "config": {"eagle_topk": 1}, "device": "cpu", "dtype": "float32"}
        with Engine(str(adding), speculative_draft_model_path=str(head.save(tmp_path / "head")), **options) as engine:
            engine.generate([TEXT], SamplingParams(temperature=0.0, max_tokens=2))
        embedded = load_file(str(adding / "model.safetensors"))["model.embed_tokens.weight"][list(TEXT)]
        return tuple(tap[: len(TEXT)] for tap in seen[0]), embedded

    return capture


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, (2, 4, 5)),
        (nested(1, 3, 4), (2, 4, 5)),
        (top(0, 3, 8), (0, 3, 8)),
        (nested(0, 3, 8), (0, 3, 8)),
        (nested(0, 3, 7), (1, 4, 8)),
        ({"target_layer_ids": [-1, 3, 7]}, (0, 4, 8)),
        (enveloped(1, 3, 8), (1, 3, 8)),
        (top(8, 0, 3), (8, 0, 3)),
    ],
)
def test_the_states_that_are_captured(
    captured: Any, config: Mapping[str, Any] | None, expected: tuple[int, ...]
) -> None:
    """10.5, layer-capture test, from the head's files to the tensors that its fc joins."""
    head = eagle3(decoder_config(SIZE)).but({IDS: None}).but({**(config or {}), "norm_before_residual": False})
    taps, embedded = captured(head)
    for tap, at in zip(taps, expected, strict=True):
        torch.testing.assert_close(tap, embedded + at)


def test_eagle1_reads_what_the_output_head_reads(captured: Any) -> None:
    """The state after the final norm, whose weight is 3."""
    (tap,), embedded = captured(eagle1(decoder_config(SIZE)), "eagle")
    last = embedded + LAYERS
    torch.testing.assert_close(tap, 3.0 * last / last.pow(2).mean(-1, keepdim=True).sqrt())


def test_writers_spell_the_same_states() -> None:
    head = eagle3(decoder_config(64), boundaries=(2, 3, 7))
    assert resolve(head.config, 9, 3).at == resolve(modelopt(head).config, 9, 3).at == (2, 3, 7)
    assert resolve(speculators(head).config, 9, 3).at == (2, 3, 7)
