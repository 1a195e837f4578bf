"""Targets made of a `config.json` alone: nothing else is read, and what comes out is finite and repeatable."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specplug.errors import UserError
from specplug.facts import build_facts, read_checkpoint
from specplug.layers import FusedLinear, RMSNorm
from specplug.models.decoder import Decoder
from specplug.models.store import local_model
from specplug.models.target import Target, load_target
from specplug.models.transformers import TransformersTarget
from specplug.models.weights import destinations, fill_dummy
from specplug.options import EngineOptions
from specplug.testing.targets import decoder_config, dense_forward

DUMMY = EngineOptions(load_format="dummy", device="cpu")
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
OTHER: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def folder(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(decoder_config() | {"eos_token_id": [3, 5]} | config))
    return path


def load(path: Path, **options: Any) -> Target:
    checkpoint = read_checkpoint(str(path), load_format="dummy")
    return load_target(path, checkpoint, dtype="float32", device="cpu", load_format="dummy", **options)


def logits(target: Target) -> Tensor:
    with torch.inference_mode():
        return target.model.logits(dense_forward(target.model, range(12))[0])


@pytest.mark.parametrize("config", [{}, QWEN2, OTHER], ids=["llama", "qwen2-tied", "transformers"])
def test_a_config_alone_makes_a_target(config: dict[str, Any], tmp_path: Path) -> None:
    path = folder(tmp_path / "m", **config)
    facts = build_facts(str(path), DUMMY)
    assert facts.target.tensors is None
    state = torch.random.get_rng_state()
    target = load_target(path, facts.target, dtype=facts.dtype, device=facts.device, load_format="dummy")
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was left where it was not found"
    assert isinstance(target.model, TransformersTarget if config is OTHER else Decoder)
    assert (target.tokenizer, target.eos_ids) == (None, (3, 5))
    assert {layer.q_heads for layer in target.model.kv_layers} == {4}
    first = logits(target)
    assert first.isfinite().all()
    assert first.std() > 1e-3, "it says something"
    assert not torch.equal(first[4], first[5])
    torch.rand(3)
    assert torch.equal(logits(load(path)), first), "the same at every start"


def test_weights_in_the_folder_are_not_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    alone = logits(load(path))
    (path / "model.safetensors").write_text("no weights at all")
    assert build_facts(str(path), DUMMY).target.tensors is None
    assert torch.equal(logits(load(path)), alone)


def test_without_dummy_the_weights_are_missed(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    with pytest.raises(UserError, match="lacks weights"):
        build_facts(str(path), EngineOptions(device="cpu"))
    with pytest.raises(UserError, match=r"lacks config\.json"):
        local_model(str(tmp_path), needs_tokenizer=False, needs_weights=False)


def test_only_the_draft_may_be_dummy(tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "m"), folder(tmp_path / "d")
    named = {"speculative_draft_model_path": str(draft), "load_format": "dummy", "device": "cpu"}
    facts = build_facts(str(target), EngineOptions(speculative_draft_load_format="dummy", **named))
    assert facts.draft is not None
    assert (facts.draft.path, facts.draft.tensors) == (str(draft), None)
    with pytest.raises(UserError, match=r"--speculative-draft-model-path .* lacks weights"):
        build_facts(str(target), EngineOptions(**named))


class Assorted(nn.Module):
    """Everything a checkpoint may hold, full of what must not stay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8, 1e-6, dtype=torch.float32)
        self.fused = FusedLinear(8, {"one": 300, "two": 200}, bias=True, dtype=torch.float32)
        self.wide = nn.Linear(8, 400, dtype=torch.bfloat16)
        self.tied = nn.Linear(8, 400, bias=False, dtype=torch.bfloat16)
        self.tied.weight = self.wide.weight
        self.register_buffer("ids", torch.full((5,), 7))
        self.register_buffer("flags", torch.ones(5, dtype=torch.bool))
        self.register_buffer("table", torch.full((3,), 9.0), persistent=False)
        for slot in destinations(self).values():
            slot.data.fill_(7)


def test_every_destination_is_filled_by_what_it_is() -> None:
    module = Assorted()
    fill_dummy(module, 1)
    assert module.norm.weight.eq(1).all()
    for name in ("one.bias", "two.bias", "wide.bias", "ids", "flags"):
        assert not destinations(module)[name].any(), name
    assert module.table.eq(9).all(), "what no checkpoint holds is computed, not filled"
    for name in ("one.weight", "two.weight", "wide.weight"):
        values = destinations(module)[name].detach().float()
        assert float(values.std()) == pytest.approx(0.02, rel=0.1), name
        assert abs(float(values.mean())) < 0.002, name
    assert module.tied.weight is module.wide.weight


def test_seeds_differ_and_repeat() -> None:
    def filled(seed: int) -> Tensor:
        module = Assorted()
        fill_dummy(module, seed)
        return torch.cat([slot.float().flatten() for slot in destinations(module).values()])

    assert torch.equal(filled(1), filled(1))
    assert not torch.equal(filled(1), filled(2))
