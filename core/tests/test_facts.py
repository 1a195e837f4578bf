"""What is known of checkpoints and host before any weight is read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specplug import placement
from specplug.errors import UserError
from specplug.facts import build_facts, facts_of, first_vocab_difference, read_checkpoint, target_features
from specplug.options import EngineOptions
from specplug.spec import Checkpoint, TensorInfo

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
WORDS = ["<s>", "a", "b", "c"]


def folder(path: Path, *, words: list[str] | None = WORDS, added: tuple[str, ...] = (), **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(
        {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "ids": torch.zeros(4, dtype=torch.int64)},
        path / "model.safetensors",
    )
    if words is not None:
        tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<s>"))
        tokenizer.add_special_tokens(list(added))
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_checkpoint_holds_headers_config_and_tokenizer(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", added=("<end>",))
    (path / "generation_config.json").write_text('{"eos_token_id": 4}')
    read = read_checkpoint(str(path), "main")
    assert read.tensors == {"w": TensorInfo("bfloat16", (2, 3)), "ids": TensorInfo("int64", (4,))}
    assert read.config == CONFIG
    assert read.generation == {"eos_token_id": 4}
    assert (read.path, read.revision, read.tokenizer_size) == (str(path), "main", 5)


def test_fingerprint_sees_order_and_added_tokens(tmp_path: Path) -> None:
    swapped = [WORDS[0], WORDS[2], WORDS[1], WORDS[3]]
    prints = {
        read_checkpoint(str(folder(tmp_path / name, words=words, added=added))).tokenizer_fingerprint
        for name, words, added in (("a", WORDS, ()), ("b", swapped, ()), ("c", WORDS, ("<x>",)), ("d", WORDS, ("<y>",)))
    }
    assert len(prints) == 4
    again = read_checkpoint(str(folder(tmp_path / "e")))
    assert again.tokenizer_fingerprint in prints


def test_first_vocab_difference_quotes_the_first_id(tmp_path: Path) -> None:
    target = str(folder(tmp_path / "target"))
    swapped = str(folder(tmp_path / "swapped", words=[WORDS[0], WORDS[2], WORDS[1], WORDS[3]]))
    longer = str(folder(tmp_path / "longer", added=("<end>",)))
    none = str(folder(tmp_path / "none", words=None))
    assert first_vocab_difference(target, target) is None
    assert first_vocab_difference(target, swapped) == (1, "a", "b")
    assert first_vocab_difference(target, longer) == (4, "", "<end>")
    assert first_vocab_difference(target, none) is None


def test_sharded_headers_and_lost_shards(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, path / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, path / "model-2.safetensors")
    index = path / "model.safetensors.index.json"

    def promise(**tensors: str) -> None:
        index.write_text(json.dumps({"weight_map": tensors}))

    promise(a="model-1.safetensors", b="model-2.safetensors")
    assert read_checkpoint(str(path)).tensors == {"a": TensorInfo("float32", (1,)), "b": TensorInfo("float32", (2,))}
    promise(a="model-1.safetensors", b="model-3.safetensors")
    with pytest.raises(UserError, match=r"shard 'model-3.safetensors'"):
        read_checkpoint(str(path))
    promise(a="model-1.safetensors", c="model-2.safetensors")
    with pytest.raises(UserError, match="promises 1 tensors that no shard holds, c first"):
        read_checkpoint(str(path))
    promise(a="../m/model-1.safetensors")
    with pytest.raises(UserError, match="names the shard"):
        read_checkpoint(str(path))


def test_bin_headers_come_from_the_meta_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(5, dtype=torch.float16)}, path / "pytorch_model.bin")
    asked: dict[str, Any] = {}
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **given: (asked.update(given), real(file, **given))[1])
    assert read_checkpoint(str(path)).tensors == {"w": TensorInfo("float16", (5,))}
    assert asked == {"map_location": "meta", "weights_only": True}
    (path / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(UserError, match="cannot be read as PyTorch weights"):
        read_checkpoint(str(path))


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", "[]", "an object is needed"),
        ("model.safetensors", "x" * 40, "cannot be read as safetensors"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
    ],
)
def test_damaged_files_are_one_line(file: str, content: str, told: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / file).write_text(content)
    with pytest.raises(UserError, match=told) as caught:
        read_checkpoint(str(path))
    assert "\n" not in str(caught.value)


def test_features_follow_the_config() -> None:
    every = {"rollback", "tree_verify", "taps", "own_kv", "read_kv"}
    assert target_features(CONFIG) == every | {"borrow:embed_tokens", "borrow:lm_head", "borrow:rope"}
    assert target_features({}) == every
    windows = {"layer_types": ["full_attention", "sliding_attention"]}
    assert "rollback" in target_features(CONFIG | windows)
    for state in (
        {"layer_types": ["full_attention", "linear_attention"]},
        {"model_type": "mamba2"},
        {"architectures": ["RwkvForCausalLM"]},
        {"ssm_state_size": 16},
        {"text_config": {"layer_types": ["linear_attention"]}},
    ):
        assert "rollback" not in target_features(CONFIG | state), state


def test_facts_resolve_auto_to_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "has_cuda", lambda: False)
    facts = build_facts(
        str(folder(tmp_path / "m")), EngineOptions(page_size=4, max_running_requests=3, context_length=32)
    )
    assert (facts.device, facts.dtype, facts.attention_backend, facts.page_size) == ("cpu", "float32", "torch", 4)
    assert (facts.limits.max_running_requests, facts.limits.context_length) == (3, 32)
    assert facts.draft is None
    assert facts.first_vocab_difference is None
    assert build_facts(str(tmp_path / "m"), EngineOptions(dtype="bfloat16")).dtype == "bfloat16"


def test_facts_of_a_draft(tmp_path: Path) -> None:
    target = str(folder(tmp_path / "target"))
    draft = str(folder(tmp_path / "draft", words=[*WORDS[:3], "z"]))
    facts = build_facts(target, EngineOptions(speculative_draft_model_path=draft))
    assert facts.draft is not None
    assert facts.draft.path == draft
    assert facts.first_vocab_difference == (3, "c", "z")
    head = str(folder(tmp_path / "head", words=None))
    facts = build_facts(target, EngineOptions(speculative_draft_model_path=head))
    assert facts.draft is not None
    assert facts.draft.tokenizer_fingerprint is None
    assert facts.first_vocab_difference is None


def test_facts_of_a_target_at_hand_need_no_known_architecture() -> None:
    assert facts_of(Checkpoint(), EngineOptions()).target == Checkpoint()


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ({"architectures": ["BloomForCausalLM"]}, {}, "BloomForCausalLM.*supported: Llama"),
        ({}, {"context_length": 33}, "--context-length 33: MODEL allows 2 to 32"),
        ({}, {"revision": "main"}, "--revision main picks a version on the hub"),
        ({}, {"speculative_draft_model_revision": "x"}, "needs --speculative-draft-model-path"),
        ({}, {"speculative_draft_model_path": "./nowhere"}, "--speculative-draft-model-path './nowhere' is neither"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    config: dict[str, Any], options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        build_facts(str(folder(tmp_path / "m", **config)), EngineOptions(**options))


def test_facts_of_safetensors_leave_torch_unimported(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    code = (
        "import ctypes, sys; from specplug.facts import build_facts; from specplug.options import EngineOptions\n"
        "def no_driver(name): raise OSError(name)\n"
        "ctypes.CDLL = no_driver\n"
        f"build_facts({str(path)!r}, EngineOptions()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
