"""`specplug bench --gate` from its arguments to its exit code."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_gated import ARGUMENTS, edit

from specplug import cli
from specplug.bench import check, session
from specplug.bench.measure import BatchRun, EngineColumn
from specplug.bench.workload import Item
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.testing.bench import LETTERS
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

TEXTS = ("abcabc", "adadad", "bebebe")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, registry: Registry, folder: Path) -> Path:
    """Prompts in ``p.jsonl`` and, in ``good.json``, the options of a drafter that knows the answers."""
    place = tmp_path_factory.mktemp("known")
    (place / "p.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS), encoding="utf-8")
    tokenizer = byte_tokenizer()
    with Engine(str(folder), registry=registry) as engine:
        prompts = [tokenizer.encode(text) for text in TEXTS]
        results = engine.generate(prompts, {"temperature": 0, "max_tokens": 48})
    texts = [[*prompt, *result.ids] for prompt, result in zip(prompts, results, strict=True)]
    for name, behaviour in (("good", "right"), ("dead", "wrong")):
        config = {"scripted_texts": texts, "num_draft_tokens": 4, "scripted_behaviour": behaviour}
        (place / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    return place


Bench = Callable[..., tuple[int, str, str]]


def run_bench(registry: Registry, known: Path, model: Path, *args: object, drafter: str = "good") -> int:
    columns = ("--algorithms", f"none,x=scripted@{known / drafter}.json", "--prompts", known / "p.jsonl")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Registry, "discover", classmethod(lambda cls: registry))
        patched.setattr(session, "load_average", lambda: 0.0)
        return cli.main(["bench", str(model), *map(str, (*columns, *args))])


@pytest.fixture
def bench(registry: Registry, folder: Path, known: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    def run(*args: object, drafter: str = "good", model: Path = folder) -> tuple[int, str, str]:
        code = run_bench(registry, known, model, *args, drafter=drafter)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def report(registry: Registry, folder: Path, known: Path) -> str:
    """What ``--json`` writes of the tiny model in float32."""
    file = known / "b.json"
    assert run_bench(registry, known, folder, *ARGUMENTS[:-2], "--json", file) == 0
    return file.read_text()


@pytest.fixture
def baseline(report: str, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    file = tmp_path / "b.json"
    file.write_text(report)
    return file


def test_a_run_passes_against_itself(bench: Bench, baseline: Path, tmp_path: Path) -> None:
    code, out, err = bench(*ARGUMENTS, "--gate", baseline, "--json", tmp_path / "new.json")
    assert (code, err) == (0, "")
    assert f"gate: as good as {baseline}: 6 answers compared\n" in out
    new = json.loads((tmp_path / "new.json").read_text())
    assert new["gate"] == {
        "baseline": str(baseline), "slack": 0.02, "floor": 0.0, "worse": [], "answers": 6, "ties": 0, "not_compared": 0
    }  # fmt: skip
    old = json.loads(baseline.read_text())
    for kept in ("model", "prompts", "columns"):
        assert new[kept] == old[kept]
    assert new["batches"][0]["answers"] == old["batches"][0]["answers"]
    assert [(row["prompt"], len(row["ids"].split())) for row in new["batches"][0]["answers"]] == [
        (0, 16),
        (1, 16),
        (2, 16),
    ]


def test_another_text_is_exit_code_1_with_prompt_and_token(
    bench: Bench, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 at any gap: the column's own text check knows nothing of it, as all columns say the same."""
    monkeypatch.setitem(check.TIES, "float32", 1e9)
    ids = json.loads(baseline.read_text())["batches"][0]["answers"][1]["ids"].split()
    was = next(token for token in LETTERS if str(token) != ids[5])
    edit(baseline, "batches/0/answers/1/ids", " ".join([*ids[:5], str(was), *ids[6:]]))
    code, out, err = bench(*ARGUMENTS, "--gate", baseline, "--json", tmp_path / "new.json")
    assert code == 1
    lines = err.splitlines()
    assert len(lines) == 2
    for line, label in zip(lines, ("none", "x"), strict=True):
        head, gap = line.split(" (gap ")
        assert head == f"gate: batch 1, {label}, prompt 2, token 6: {ids[5]}, was {was}"
        assert 0 < float(gap.removesuffix(")")) < 100
    assert f"gate: 2 worse than {baseline}: 6 answers compared\n" in out
    assert [f"gate: {line}" for line in json.loads((tmp_path / "new.json").read_text())["gate"]["worse"]] == lines


def test_a_column_that_lies_is_named_by_both_checks(
    bench: Bench, baseline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = EngineColumn.run

    def lie(self: EngineColumn, items: Sequence[Item], sampling: Any) -> BatchRun:
        run = honest(self, items, sampling)
        if self.label == "x" and items[0].source.number == 0:
            run.answers = [replace(answer, ids=answer.ids[:-1]) for answer in run.answers]
        return run

    monkeypatch.setattr(EngineColumn, "run", lie)
    token = json.loads(baseline.read_text())["batches"][0]["answers"][0]["ids"].split()[-1]
    code, _, err = bench(*ARGUMENTS, "--gate", baseline)
    assert code == 1
    assert err.splitlines() == [
        "error: 1 answers differ from those of 'none' by more than a tie (table: text)",
        f"gate: batch 1, x, prompt 1, token 16: the end, was {token}",
    ]


def test_dead_drafts_are_exit_code_1(bench: Bench, baseline: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.json"
    code, _, err = bench(*ARGUMENTS, "--gate", baseline, "--json", file, drafter="dead")
    assert code == 1
    old, new = (json.loads(path.read_text())["batches"][0]["columns"]["x"]["ledger"] for path in (baseline, file))
    assert old["accept_length"] > 2 > 1 == new["accept_length"]
    [line] = [line for line in err.splitlines() if line.startswith("gate: ")]
    assert line == (
        f"gate: batch 1, x: 1.000 tokens per target step, was {old['tokens_per_target_step']:.3f} "
        f"(accept length 1.000, was {old['accept_length']:.3f}; "
        f"coverage {new['draft_coverage']:.3f}, was {old['draft_coverage']:.3f})"
    )
    code, _, err = bench(*ARGUMENTS, "--gate", baseline, "--gate-slack", 0.9, drafter="dead")
    assert (code, "gate: " in err) == (0, False)


def test_a_slow_drafter_is_exit_code_1(bench: Bench, baseline: Path) -> None:
    code, _, err = bench(*ARGUMENTS[:-1], 900, "--gate", baseline)
    assert code == 1
    [line] = err.splitlines()
    assert line.startswith("gate: batch 1, x: speed-up ")
    assert line.endswith(", at least 900 is wanted")


def test_half_precision_lets_ties_pass_and_counts_them(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "b.json"
    assert bench(*ARGUMENTS[:-2], "--dtype", "bfloat16", "--json", file)[0] == 0
    ids = json.loads(file.read_text())["batches"][0]["answers"][0]["ids"].split()
    was = next(token for token in LETTERS if str(token) != ids[3])
    edit(file, "batches/0/answers/0/ids", " ".join([*ids[:3], str(was), *ids[4:]]))
    for tie, code in ((1e9, 0), (0.0, 1)):
        monkeypatch.setitem(check.TIES, "bfloat16", tie)
        found, out, err = bench(*ARGUMENTS, "--dtype", "bfloat16", "--gate", file)
        assert found == code, err
        assert (f"6 answers compared, {2} part at a tie (largest gap " in out) == (code == 0)
        assert err.count("prompt 1, token 4: ") == 2 * code


def test_sampled_text_is_gated_under_coupled(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    sampled = (*ARGUMENTS[:-2], "--temperature", 1)
    assert bench(*sampled, "--json", file)[0] == 0
    assert bench(*sampled, "--gate", file, "--gate-floor", 0)[0] == 0
    code, _, err = bench(*sampled, "--gate", file, "--speculative-acceptance", "rejection")
    assert (code, err.count("\n")) == (2, 1)
    assert (
        "sampled text then depends on the drafts, so a change proves nothing: take coupled, or --temperature 0" in err
    )


def test_random_input_is_gated_too(bench: Bench, folder: Path, tmp_path: Path) -> None:
    arguments = ("--algorithms", "none", "--random-input", 4, "--limit", 2, "--output-len", 4, "--repeat", 1)

    def run(*more: object) -> int:
        return cli.main(["bench", str(folder), *map(str, (*arguments, *more))])

    file = tmp_path / "b.json"
    assert run("--json", file) == 0
    assert run("--gate", file) == 0
    edit(file, "batches/0/answers/1/ids", "1 2 3 4")
    assert run("--gate", file) == 1


def test_a_hand_edited_token_beyond_the_vocabulary_is_no_crash(bench: Bench, baseline: Path) -> None:
    edit(baseline, "batches/0/answers/0/ids", "999999")
    code, _, err = bench(*ARGUMENTS, "--gate", baseline)
    assert code == 1
    assert err.splitlines()[0].endswith("was 999999")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gate", "nowhere.json"], "--gate nowhere.json: cannot read it (No such file or directory)"),
        (["--gate", "BASELINE", "--max-tokens", "8"], "--max-tokens differs: 16 there, 8 here"),
        (["--gate", "BASELINE", "--batch-sizes", "1,2"], "--batch-sizes differs: 1 there, 1,2 here"),
        (["--gate", "BASELINE", "--limit", "2"], "the number of prompts differs: 3 there, 2 here"),
        (["--gate", "BASELINE", "--dtype", "bfloat16"], "--dtype differs: float32 there, bfloat16 here"),
        (["--gate", "BASELINE", "--json", "BASELINE"], "is the baseline of --gate"),
        (["--gate", "BASELINE", "--transformers"], "with --transformers: its columns are not gated"),
        (["--gate", "BASELINE", "--speculative-acceptance", "synthetic:2"], "under synthetic acceptance the text"),
        (["--gate", "BASELINE", "--url", "http://127.0.0.1:1"], "with --url http://127.0.0.1:1: a server's report"),
        (["--gate", "BASELINE", "--gate-slack", "2"], "--gate-slack 2: give a share from 0 to below 1"),
        (["--gate", "BASELINE", "--gate-floor", "x"], "--gate-floor x: give a speed-up"),
        (["--gate-slack", "0.1"], "--gate-slack 0.1 is for --gate: add --gate BASELINE.json"),
        (["--gate-floor", "0"], "--gate-floor 0 is for --gate: add --gate BASELINE.json"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(
    bench: Bench, baseline: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    def load(*args: object, **options: object) -> SimpleNamespace:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(session, "load_target", load)
    given = [str(baseline) if word == "BASELINE" else word for word in arguments]
    code, out, err = bench("--max-tokens", 16, "--repeat", 1, *given)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("warning: --speculative-acceptance")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert said in lines[0]


def test_another_model_is_refused_before_it_is_loaded(
    bench: Bench, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    decoder_target(2, SIZE, folder=other, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    monkeypatch.setattr(session, "load_target", None)
    code, _, err = bench(*ARGUMENTS, "--gate", baseline, model=other)
    assert (code, err.count("\n")) == (2, 1)
    assert f"MODEL differs: {Path(json.loads(baseline.read_text())['model']['name'])} there, {other} with other" in err


def test_a_copy_of_the_model_on_another_machine_is_the_same_and_the_machine_is_said(
    bench: Bench, baseline: Path, folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    edit(baseline, "host/processor", "Other")
    code, _, err = bench(*ARGUMENTS, "--gate", baseline, model=copy)
    assert code == 0
    assert err.startswith(f"warning: --gate {baseline} was made with processor Other (here ")
    assert err.count("\n") == 1
