"""One line for every mistake in the arguments of `specplug bench`, before weights load."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specplug.bench import session

PROMPTS = ["--prompts", "PROMPTS"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (PROMPTS, "--algorithms is missing"),
        (["--algorithms", "none"], "give either --prompts FILE or --random-input LEN"),
        (["--algorithms", "none", *PROMPTS, "--random-input", "4"], "give either --prompts FILE or --random-input LEN"),
        (["--algorithms", "none", "--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl: cannot read it"),
        (["--algorithms", "none", "--prompts", "EMPTY"], "holds no prompt"),
        (["--algorithms", "none", "--prompts", "BROKEN"], "line 1: not valid JSON"),
        (["--algorithms", "none,scriptd", *PROMPTS], "--algorithms scriptd: "),
        (["--algorithms", "none,x=scripted@BROKEN", *PROMPTS], "not valid JSON at line 1"),
        (["--algorithms", "none,x=none@OPTIONS", *PROMPTS], "has no effect with --speculative-algorithm none"),
        (["--algorithms", "none,x=scripted@NOSUCH", *PROMPTS], "--algorithms x: "),
        (["--algorithms", "none,x=scripted@HEAD", *PROMPTS], "--algorithms x: --speculative-draft-model-path './no"),
        (["--algorithms", "none,x=none@ADAPT", *PROMPTS], "x: --speculative-adaptive has no effect with --spec"),
        (["--algorithms", "none,x=scripted@POLICY", *PROMPTS], "x: --speculative-adaptive-policy ema has no effect"),
        (["--algorithms", "none,scripted", *PROMPTS, "--speculative-algorithm", "scripted"], "give one of them"),
        (
            ["--algorithms", "none,scripted", *PROMPTS, "--speculative-num-draft-tokens", "4"],
            "does not say for which column",
        ),
        (["--algorithms", "none", *PROMPTS, "--batch-sizes", "0"], "--batch-sizes 0: "),
        (["--algorithms", "none", *PROMPTS, "--batch-sizes", "1,x"], "--batch-sizes 1,x: "),
        (["--algorithms", "none", *PROMPTS, "--batch-sizes", "2,2"], "--batch-sizes 2,2: "),
        (["--algorithms", "none", *PROMPTS, "--batch-sizes", "5"], "there are only 4 prompts"),
        (["--algorithms", "none", *PROMPTS, "--batch-sizes", "4", "--max-running-requests", "2"], "is below --batch"),
        (["--algorithms", "none", *PROMPTS, "--max-tokens", "0"], "--max-tokens 0"),
        (["--algorithms", "none", *PROMPTS, "--max-tokens", "1"], "--max-tokens 1"),
        (["--algorithms", "none", *PROMPTS, "--output-len", "4"], "write --max-tokens 4"),
        (["--algorithms", "none", "--random-input", "4", "--max-tokens", "4"], "write --output-len 4"),
        (["--algorithms", "none", "--random-input", "4", "--per-category", "4"], "--per-category 4"),
        (["--algorithms", "none", "--random-input", "0"], "--random-input"),
        (["--algorithms", "none", "--random-input", "600"], "prompt 1 has 600 tokens"),
        (["--algorithms", "none", *PROMPTS, "--temperature", "-1"], "--temperature -1"),
        (["--algorithms", "none", *PROMPTS, "--temperature", "1", "--transformers"], "only greedy answers"),
        (["--algorithms", "none", *PROMPTS, "--limit", "0"], "--limit"),
        (["--algorithms", "none", *PROMPTS, "--repeat", "0"], "--repeat"),
        (["--algorithms", "none", *PROMPTS, "--seed", "-1"], "--seed"),
        (["--algorithms", "none", *PROMPTS, "--json", "no/such/file.json"], "--json no/such/file.json: cannot be"),
        (["--algorithms", "none", *PROMPTS, "--plot", "a.pdf"], "ends in .png"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    bench: Any, prompts: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    texts = {"EMPTY": "\n", "BROKEN": "{", "OPTIONS": '{"num_draft_tokens": 4}', "NOSUCH": '{"nonsense": 1}'}
    texts |= {"HEAD": '{"speculative_draft_model_path": "./nowhere"}', "ADAPT": '{"speculative_adaptive": true}'}
    texts |= {"POLICY": '{"speculative_adaptive_policy": "ema"}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = []
    for word in arguments:
        for name in texts:
            word = word.replace(name, str(tmp_path / name))
        words.append(str(prompts) if word == "PROMPTS" else word)
    code, out, err = bench(*words)
    assert code == 2
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert said in lines[0]


def test_refusals_come_before_weights(bench: Any, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> SimpleNamespace:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(session, "load_target", load)
    assert bench("--algorithms", "none,scriptd", "--prompts", prompts)[0] == 2
