"""`specplug bench` from its arguments to its report."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_tiny import answered

from specplug.bench import session
from specplug.bench.measure import BatchRun, EngineColumn
from specplug.bench.workload import Item
from specplug.models.target import Target
from specplug.options import EngineOptions
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.runtime.memory import DeviceMemory
from specplug.testing.tokenizer import EOS, byte_tokenizer


def drafted(tmp_path: Path, registry: Registry, target: Target, prompts: Sequence[Sequence[int]]) -> Path:
    """Options with which the scripted drafter knows the greedy answers to `prompts`."""
    with Engine(target, registry=registry) as engine:
        results = engine.generate([list(prompt) for prompt in prompts], {"temperature": 0, "max_tokens": 48})
    texts = [[*prompt, *result.ids] for prompt, result in zip(prompts, results, strict=True)]
    path = tmp_path / "scripted.json"
    path.write_text(json.dumps({"scripted_texts": texts, "num_draft_tokens": 4}), encoding="utf-8")
    return path


def test_the_report_holds_everything(
    bench: Any, prompts: Path, registry: Registry, folder: Path, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    with Engine(str(folder), registry=registry) as engine:
        file = drafted(
            tmp_path, registry, engine.target, [tokenizer.encode(text) for text in ("abcabc", "adadad", "bebebe")]
        )
    out = tmp_path / "out.json"
    code, text, err = bench(
        "--algorithms", f"none,known=scripted@{file}", "--prompts", prompts, "--max-tokens", 24, "--repeat", 2,
        "--batch-sizes", "1,3", "--json", out, "--page-size", 4,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out.read_text())
    assert report["columns"]["known"]["distribution"] == "specplug-scripted"
    assert report["columns"]["known"]["settings"]["num_draft_tokens"] == {"value": 4, "source": "user", "because": ""}
    assert report["host"]["versions"]["specplug-scripted"] == "0.1.0"
    fingerprint = report["model"].pop("fingerprint")
    assert len(fingerprint) == 16
    assert report["model"] == {"name": str(folder), "dtype": "float32", "device": "cpu"}
    assert "unknown" in report["floor"]  # a toy fits the caches
    assert report["notes"] == ["batch 3: the last 1 prompts are left out, they fill no batch"]
    one, three = report["batches"]
    assert (one["size"], three["size"]) == (1, 3)
    plain, known = one["columns"]["none"], one["columns"]["known"]
    assert (plain["answers"], plain["output_tokens"]) == (8, 8 * 24)
    assert known["text"]["verdict"] == "identical"
    assert known["ledger"]["accept_rate"] == 1.0
    assert known["ledger"]["tokens_per_target_step"] > 2.0
    assert known["steps"]["count"] < plain["steps"]["count"]
    assert known["steps"]["width"] > 2.0 > plain["steps"]["width"] == 1.0
    assert known["steps"]["ms"]["draft"] > 0.0 == plain["steps"]["ms"]["draft"]
    assert set(known["categories"]) == {"a", "b"}
    assert three["columns"]["none"]["steps"]["rows"] == 3.0
    assert 0 < known["peak_pages"] <= known["pages"]
    for words in ("known", "identical", "by category", "peak pages", "load average 0.00", "the last 1 prompts"):
        assert words in text, words


def test_json_on_the_output_is_nothing_but_json(bench: Any, prompts: Path) -> None:
    code, out, err = bench(
        "--algorithms", "none", "--prompts", prompts, "--max-tokens", 4, "--repeat", 1, "--limit", 1, "--json", "-"
    )
    assert code == 0
    assert json.loads(out)["prompts"]["count"] == 1
    assert "speed-up over none" in err


def test_random_input_needs_no_tokenizer(bench: Any, bare: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, _, err = bench(
        "--speculative-algorithm", "scripted", "--speculative-num-draft-tokens", 3, "--random-input", 8,
        "--output-len", 5, "--batch-sizes", 2, "--repeat", 1, "--json", out, model=bare,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out.read_text())
    assert list(report["columns"]) == ["none", "scripted"]
    assert report["columns"]["scripted"]["plan"]["nodes"] == 2
    plain = report["batches"][0]["columns"]["none"]
    assert plain["output_tokens"] == 5 * plain["answers"] == 5 * 8
    assert plain["prefill"]["tokens"] == 8 * 8


def test_sampled_texts_are_compared_under_coupled_only(bench: Any, prompts: Path, tmp_path: Path) -> None:
    for rule, verdict in (("coupled", "identical"), ("rejection", "not compared")):
        out = tmp_path / f"{rule}.json"
        code, _, err = bench(
            "--algorithms", "none,scripted-dense", "--prompts", prompts, "--max-tokens", 8, "--repeat", 1,
            "--temperature", 1, "--speculative-acceptance", rule, "--json", out,
        )  # fmt: skip
        assert code == 0, err
        assert json.loads(out.read_text())["batches"][0]["columns"]["scripted-dense"]["text"]["verdict"] == verdict


def test_synthetic_acceptance_is_labelled_everywhere(bench: Any, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text, err = bench(
        "--algorithms", "none,scripted-dense", "--prompts", prompts, "--max-tokens", 8, "--repeat", 1,
        "--speculative-acceptance", "synthetic:2", "--json", out,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out.read_text())
    assert report["lossy"] is True
    assert {label: column["lossy"] for label, column in report["columns"].items()} == {
        "none": False,
        "scripted-dense": True,
    }
    assert report["columns"]["scripted-dense"]["acceptance"] == "synthetic:2"
    assert {each["text"]["verdict"] for each in report["batches"][0]["columns"].values()} == {"not compared"}
    assert err.count("is lossy") == 1
    titles = [line for line in text.splitlines() if line.startswith("LOSSY")]
    assert any("speed-up over none" in title for title in titles)
    assert any("acceptance, pooled" in title for title in titles)


def test_an_honest_run_is_not_labelled(bench: Any, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    _, text, err = bench(
        "--algorithms", "none", "--prompts", prompts, "--max-tokens", 4, "--repeat", 1, "--limit", 1, "--json", out
    )
    report = json.loads(out.read_text())
    assert (report["lossy"], report["columns"]["none"]["lossy"]) == (False, False)
    assert "lossy" not in (text + err).lower()


def test_engines_of_a_comparison_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(session, "device_memory", lambda device: asked.append(device) or DeviceMemory(100, 80))
    model = SimpleNamespace(parameters=lambda: iter([torch.empty(1, device="meta")]))
    job = SimpleNamespace(options=EngineOptions(mem_fraction_static=0.8))
    size = session._Size(job, None, SimpleNamespace(model=model), (), 1, "float32", True)
    assert size._share(2) == {"mem_fraction_static": pytest.approx(0.5)}
    assert size._share(1) == {}
    model.parameters = lambda: iter([torch.empty(1)])
    assert size._share(2) == {}
    assert len(asked) == 1


def test_dummy_weights_are_compared_with_nothing_else(bench: Any, bare: Path, prompts: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((bare / "config.json").read_bytes())
    arguments = ("--algorithms", "none", "--batch-sizes", 1, "--repeat", 1, "--limit", 1, "--load-format", "dummy")
    code, _, err = bench(*arguments, "--random-input", 4, "--output-len", 3, model=alone)
    assert code == 0, err
    code, _, err = bench(*arguments, "--random-input", 4, "--transformers", model=alone)
    assert code == 2
    assert "--transformers with --load-format dummy" in err
    code, _, err = bench(*arguments, "--prompts", prompts, model=alone)
    assert code == 2
    assert "tokenizer" in err


def test_a_changed_text_is_exit_code_1(bench: Any, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EngineColumn.run

    def lie(self: EngineColumn, items: Sequence[Item], sampling: Any) -> BatchRun:
        run = honest(self, items, sampling)
        return run if self.label == "none" else answered(run, {0: [EOS, *run.answers[0].ids[1:]]})

    monkeypatch.setattr(EngineColumn, "run", lie)
    code, out, err = bench("--algorithms", "none,scripted", "--prompts", prompts, "--max-tokens", 4, "--repeat", 1)
    assert code == 1
    assert "DIFFERENT 4/4" in out
    assert "error: 4 answers differ from those of 'none'" in err


def test_a_busy_machine_is_warned_of(bench: Any, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_average", lambda: 0.51)
    arguments = ("--algorithms", "none", "--prompts", prompts, "--max-tokens", 2, "--repeat", 1, "--limit", 1)
    assert "warning: load average 0.51 is above 0.5" in bench(*arguments)[2]
    monkeypatch.setattr(session, "load_average", lambda: 0.5)
    assert "warning" not in bench(*arguments)[2]


def test_the_plot_needs_its_extra(bench: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, _, err = bench("--algorithms", "none", "--prompts", prompts, "--plot", tmp_path / "a.png")
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install 'specplug[plot]'" in err


def test_the_plot_is_a_png(bench: Any, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    code, _, err = bench(
        "--algorithms", "none,scripted", "--prompts", prompts, "--max-tokens", 4, "--repeat", 1, "--plot", picture
    )
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG")
