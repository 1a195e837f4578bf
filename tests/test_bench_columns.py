"""Algorithms with and without draft models side by side: `specplug bench`, `specplug demo`, benchmarks/drafts.py."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specplug import cli
from specplug.cli.demo_prompts import DemoPrompt
from specplug.models import target
from specplug.runtime.engine import Engine
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent
LETTERS = tuple(range(ord("a"), ord("i")))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target `target` and a draft model `draft`, which is the working directory."""
    for name, seed in (("target", 1), ("draft", 2)):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        (tmp_path / name).mkdir()
        decoder_target(seed, SIZE, folder=tmp_path / name, tokenizer=tokenizer, alphabet=LETTERS)
    (tmp_path / "own.json").write_text('{"num_steps": 2, "speculative_draft_model_path": "draft"}', encoding="utf-8")
    prompts = [{"prompt": "abcabcab", "category": "a"}, {"prompt": "hghghgh", "category": "b"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders from which a target was loaded."""
    found: list[str] = []
    honest = target.load_target

    def load(folder: Path, *args: Any, **options: Any) -> Any:
        found.append(folder.name)
        return honest(folder, *args, **options)

    for module in ("specplug.bench.session", "specplug.runtime.build"):
        monkeypatch.setattr(f"{module}.load_target", load)
    return found


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The algorithm and the draft model's folder of every engine that was made."""
    found: list[tuple[str, str | None]] = []
    honest: Callable[..., None] = Engine.__init__

    def make(self: Engine, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        draft = self.run.facts.draft
        found.append((self.run.algorithm, None if draft is None else Path(draft.path).name))

    monkeypatch.setattr(Engine, "__init__", make)
    return found


COLUMNS = "none,ngram,small=standalone@own.json"
SHORT = (DemoPrompt("copy", "abcabc", copies=True), DemoPrompt("free", "hg", copies=False))
ENGINES = [("none", None), ("ngram", None), ("standalone", "draft")]


def test_bench_gives_a_draft_model_to_one_column(
    place: Path, loads: list[str], drafts: list[tuple[str, str | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "target", "--algorithms", COLUMNS, "--prompts", "prompts.jsonl", "--max-tokens", "8"]
    assert cli.main([*words, "--repeat", "1", "--json", "out.json"]) == 0, capsys.readouterr().err
    assert drafts == ENGINES
    assert loads == ["target"]
    report = json.loads((place / "out.json").read_text(encoding="utf-8"))
    assert report["columns"]["small"]["options"] == {"speculative_draft_model_path": "draft"}
    assert report["columns"]["ngram"]["options"] == {}
    found = report["batches"][0]["columns"]
    assert {each["text"]["verdict"] for each in found.values()} == {"identical"}
    assert found["small"]["ledger"]["drafted"] > 0


def test_a_draft_model_for_all_says_how_to_give_it_to_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "target", "--algorithms", "none,ngram,standalone", "--prompts", "prompts.jsonl"]
    assert cli.main([*words, "--speculative-draft-model-path", "draft"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --algorithms ngram: ")
    assert line.endswith("one column's own draft model is speculative_draft_model_path in its FILE.json")


def test_the_demo_shows_the_columns_that_it_is_told(
    place: Path,
    loads: list[str],
    drafts: list[tuple[str, str | None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("specplug.cli.demo.PROMPTS", SHORT)
    assert cli.main(["demo", "target", "--algorithms", COLUMNS, "--max-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert drafts == ENGINES
    assert loads == ["target"]
    assert out.count("identical") == 6
    assert "DIFFERENT" not in out
    assert "small: median " in out
    assert out.index("none") < out.index("ngram") < out.index("small")
    assert cli.main(["demo", "target", "--algorithms", "none,x=standalone", "--max-tokens", "3"]) == 2
    assert loads == ["target"]  # refused before anything is loaded
    assert "error: --algorithms x: " in capsys.readouterr().err


def test_the_table_of_drafts(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("drafts_benchmark", ROOT / "benchmarks" / "drafts.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (place / "spec-bench").mkdir()
    (place / "prompts.jsonl").rename(place / "spec-bench" / "question.jsonl")
    (place / "humaneval.jsonl").write_text('{"turns": ["abcabcabc"]}\n{"turns": ["no"]}', encoding="utf-8")
    known = {"small": {"algorithm": "standalone", "num_steps": 2, "speculative_draft_model_path": "draft"}}
    known |= {"gone": {"algorithm": "standalone", "speculative_draft_model_path": "nowhere"}}
    (place / "known.json").write_text(json.dumps(known), encoding="utf-8")
    words = ["--model", "target", "--prompts", ".", "--out", "found", "--columns", "known.json", "--max-tokens", "6"]
    words += ["--sets", "spec-bench", "humaneval", "--limit", "1"]
    assert script.measure(script.arguments(words)) == 0
    assert "gone is left out: there is no draft model in nowhere" in capsys.readouterr().err
    found = json.loads((place / "found" / "drafts.json").read_text(encoding="utf-8"))
    keys = [(row["temperature"], row["set"], row["category"], row["answers"]) for row in found["rows"]]
    sets = [("spec-bench", "", 2), ("spec-bench", "a", 1), ("spec-bench", "b", 1), ("humaneval", "", 1)]
    assert keys == [(temperature, *each) for temperature in (0.0, 1.0) for each in sets]
    assert "speed_up" not in found["rows"][0]  # nobody said that the machine is quiet
    assert found["rows"][0]["text"]["verdict"] == "identical"
    parts = [row for row in found["rows"][1:3] if row["category"]]
    assert found["rows"][0]["rounds"] == sum(row["rounds"] for row in parts)
    tables = (place / "found" / "drafts.md").read_text(encoding="utf-8")
    row = found["rows"][0]
    assert f"| **spec-bench** | 2 | {row['tokens_per_target_step']:.2f} |" in tables
    assert "| spec-bench | small | 0 of 2 |" in tables
    assert "x |" not in tables
    faulty = {"different": 1, "faults": 1, "tie": 1e-4, "largest_gap": 0.5, "skipped": ""}
    assert script._texts(row | {"text": faulty}) == "1 of 2, largest gap 5.0e-01, 1 MORE THAN A TIE"
    assert script._texts(row | {"text": faulty | {"faults": 0}}).endswith("all within 0.0001")
    with pytest.raises(SystemExit):
        script.arguments([*words, "--sets", "nothing"])


def test_the_columns_that_the_repository_brings_name_what_is_there() -> None:
    """Every entry can be read as a column; the head that is committed is where they say."""
    script = json.loads((ROOT / "benchmarks" / "drafts.json").read_text(encoding="utf-8"))
    head = json.loads((ROOT / "training" / "drafts" / "eagle3-chain-2.json").read_text(encoding="utf-8"))
    assert (ROOT / head["speculative_draft_model_path"] / "model.safetensors").is_file()
    assert script["EAGLE3-chain-2"] == {"algorithm": "eagle3", **head}
