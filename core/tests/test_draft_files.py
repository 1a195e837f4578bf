"""Weights of a draft in files that an algorithm names: who reads which, and what is refused."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from specplug import Checkpoint, Facts, RefusedError, TensorInfo, UserError
from specplug.facts import facts_of
from specplug.models.store import local_model
from specplug.options import EngineOptions
from specplug.planning import Run, plan_run
from specplug.runtime.context import EngineContext
from specplug.runtime.demand import weight_bytes
from specplug.testing.stubs import Stub, stub_registry
from specplug.testing.targets import decoder_config

CPU = torch.device("cpu")
HEADS = ("heads.safetensors", "heads.pt")
TARGET = Checkpoint(config=decoder_config(), tensors={})


def reader(name: str, *files: str, extra: str = "") -> Stub:
    """Return a package whose algorithm names `files`."""
    source = (
        "_sound = [specplug_algorithms]\n@hookimpl\ndef specplug_algorithms():\n"
        f"    return [spec.model_copy(update={{'draft_files': {files!r}}}) for spec in _sound[0]()]\n"
    )
    return Stub(f"acme-{name}", algorithms=[name], extra=source + extra)


@pytest.fixture
def installed(tmp_path: Path) -> Any:
    """Return a function that makes a registry of stubs; the path is cleaned up afterwards."""
    with ExitStack() as opened:
        yield lambda *stubs: opened.enter_context(stub_registry(tmp_path / "site", *stubs))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A draft without weights."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    return folder


def facts(folder: Path, registry: Any, **options: Any) -> Facts:
    asked = EngineOptions(speculative_draft_model_path=str(folder), device="cpu", **options)
    return facts_of(TARGET, asked, draft_files=registry.draft_files)


def planned(registry: Any, word: str, folder: Path) -> Run:
    return plan_run(registry, word, {}, facts(folder, registry))


def stored(run: Run) -> dict[str, torch.Tensor]:
    return dict(EngineContext(run.facts, 1, CPU, torch.float32, 64).weights("draft"))


def test_each_algorithm_reads_its_own_files_beside_the_standard_ones(installed: Any, draft: Path) -> None:
    registry = installed(reader("heads", *HEADS), reader("mask", "mask.bin"), reader("plain"))
    assert registry.draft_files == ("heads.pt", "heads.safetensors", "mask.bin")
    save_file({"w": torch.full((2,), 1.0)}, draft / "model.safetensors")
    torch.save({"h": torch.full((3,), 2.0)}, draft / "heads.pt")
    torch.save({"m": torch.full((4,), 3.0)}, draft / "mask.bin")
    for word, names, files in (
        ("heads", ["w", "h"], ("heads.pt",)),
        ("mask", ["w", "m"], ("mask.bin",)),
        ("plain", ["w"], ()),
    ):
        run = planned(registry, word, draft)
        assert run.facts.draft is not None
        assert run.facts.draft.files == files
        assert list(run.facts.draft.tensors or ()) == names
        assert list(stored(run)) == names
        assert any(f"{files[0]} of {draft}" in line for line in run.trace) if files else True
    base = facts(draft, registry).draft
    assert base is not None
    assert base.files == ("heads.pt", "mask.bin"), "hooks see what is there"
    assert base.tensors == {"w": TensorInfo("float32", (2,))}
    save_file({"h": torch.full((3,), 4.0)}, draft / "heads.safetensors")
    assert stored(planned(registry, "heads", draft))["h"].tolist() == [4.0] * 3, "the first of a stem is read"


def test_pickled_files_give_tensors_only(installed: Any, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = installed(reader("heads", *HEADS))
    torch.save({"h": torch.ones(3), "count": 3}, draft / "heads.pt")
    asked: list[bool] = []
    real = torch.load
    monkeypatch.setattr(
        torch, "load", lambda file, **given: (asked.append(given["weights_only"]), real(file, **given))[1]
    )
    run = planned(registry, "heads", draft)
    assert list(stored(run)) == ["h"]
    assert asked
    assert all(asked)
    torch.save({"h": draft}, draft / "heads.pt")
    with pytest.raises(RefusedError, match=r"heads\.pt cannot be read as PyTorch weights"):
        planned(registry, "heads", draft)
    torch.save([torch.ones(3)], draft / "heads.pt")
    with pytest.raises(RefusedError, match=r"heads\.pt holds no tensors at its top level"):
        planned(registry, "heads", draft)


def test_missing_doubled_and_foreign_files_are_one_line(installed: Any, draft: Path) -> None:
    registry = installed(reader("heads", *HEADS, "more.pt"), reader("plain"))
    with pytest.raises(UserError, match=r"-path '.*' lacks weights \(model.* or heads\.pt or .* or more\.pt\)"):
        facts(draft, registry)
    torch.save({"h": torch.ones(3)}, draft / "heads.pt")
    with pytest.raises(RefusedError, match=r"'plain' reads nothing of its heads\.pt, and there is no model\*"):
        planned(registry, "plain", draft)
    torch.save({"h": torch.ones(3)}, draft / "more.pt")
    with pytest.raises(RefusedError, match=r"tensor h is stored in heads\.pt and in more\.pt; keep one") as caught:
        planned(registry, "heads", draft)
    assert "\n" not in str(caught.value)
    run = plan_run(registry, "heads", {}, facts(draft, registry, speculative_draft_load_format="dummy"))
    assert run.facts.draft is not None
    assert (run.facts.draft.tensors, run.facts.draft.files) == (None, ())


def test_what_a_part_reads_is_counted(installed: Any, draft: Path) -> None:
    """A whole that names no files is planned over parts that do; memory is that of both."""
    both = (
        "\ndef plan(config, facts, depth):\n"
        "    return specplug.combined_plan(facts.plan_of('heads', {}), facts.plan_of('plain', {}, draft=False))\n"
    )
    registry = installed(reader("heads", *HEADS), reader("plain"), reader("both", extra=both))
    torch.save({"h": torch.ones(3)}, draft / "heads.pt")
    run = planned(registry, "both", draft)
    assert run.facts.draft is not None
    assert run.facts.draft.tensors == {}
    assert run.draft is not None
    assert weight_bytes(run.draft, 4) == 12
    save_file({"w": torch.ones(2)}, draft / "model.safetensors")
    run = planned(registry, "both", draft)
    assert run.draft is not None
    assert weight_bytes(run.draft, 4) == 20


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../heads.pt", "a file name without folder or wildcard is needed"),
        ("*.pt", "a file name without folder or wildcard is needed"),
        ("heads.gguf", "one that ends in .safetensors, .bin, .pt is needed"),
        ("model.pt", r"model\* and pytorch_model\* are read anyway"),
    ],
)
def test_a_manifest_with_such_a_name_is_broken(name: str, says: str, installed: Any) -> None:
    registry = installed(reader("heads", name))
    assert registry.draft_files == ()
    with pytest.raises(RefusedError, match=says):
        plan_run(registry, "heads", {}, Facts(target=TARGET))


def test_named_files_are_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        for name in ("config.json", "heads.pt"):
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_model("some/heads", needs_tokenizer=False, further=HEADS) == tmp_path
    assert set(HEADS) <= set(asked)
    assert "*.pt" not in asked
