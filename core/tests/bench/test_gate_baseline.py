"""`specplug bench --gate`: every file that is no baseline, and every run that cannot be compared with one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from bench_gated import X, changed, gate, made

from specplug.bench.gate import Gate, check_asked, check_planned, host_warning, open_gate
from specplug.bench.report import Report, read_report
from specplug.errors import UserError


def opened(tmp_path: Path, content: str | bytes, **options: Any) -> Gate:
    file = tmp_path / "b.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_gate(str(file), options.get("slack"), options.get("floor"), options.get("json_path"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not valid JSON (Expecting value at line 1)"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON (nested too deeply)"),
        (b"\xff", "not UTF-8 text"),
        ("[]", "it is no report"),
        ("null", "it is no report"),
        ("{}", "host is missing: make it again with this version's bench --json"),
        (changed("model/fingerprint", ...), "model.fingerprint is missing: make it again"),
        (changed("batches/0/answers", ...), "batches.0.answers is missing: make it again"),
        (changed("batches/0/answers", []), "batches.0.answers is not as bench writes it"),
        (changed("batches/0/answers/0/ids", "1 two"), "batches.0.answers.0.ids.1 is not as bench writes it"),
        (changed("batches/0/answers/0/ids", "1 -2"), "batches.0.answers.0.ids.1 is not as bench writes it"),
        (changed("batches/0/columns/x", ...), "batch 1 lacks column 'x' or its ledger: make it again"),
        (changed("batches", []), "batches is not as bench writes it"),
        (changed("columns", {}), "columns is not as bench writes it"),
        (changed(f"{X}/ledger/tokens_per_target_step", math.nan), "tokens_per_target_step is not as bench writes it"),
        (changed(f"{X}/ledger", None), "batch 1 lacks column 'x' or its ledger: make it again"),
        (changed("lossy", True), "it was made under synthetic acceptance"),
        (changed(f"{X}/text/faults", 1), "batch 1, x: its text differs from that of 'none', so it is no baseline"),
        (changed(f"{X}/text/skipped", "under rejection"), "batch 1, x: its text was not compared (under rejection)"),
    ],
)
def test_a_file_that_is_no_baseline(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        opened(tmp_path, json.dumps(content) if isinstance(content, dict) else content)
    assert str(error.value).startswith(f"--gate {tmp_path}/b.json: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^--gate .*/nowhere: cannot read it \(No such file or directory\): give a JSON"
    ):
        read_report(str(tmp_path / "nowhere"), "--gate")
    with pytest.raises(UserError, match=r"cannot read it \(Is a directory\)"):
        read_report(str(tmp_path), "--gate")


@pytest.mark.parametrize("text", ["-0.1", "1", "nan", "inf", "much", ""])
def test_slack_is_a_share(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=rf"^--gate-slack {text}: give a share from 0 to below 1"):
        opened(tmp_path, json.dumps(made()), slack=text)


@pytest.mark.parametrize("text", ["-0.1", "1000", "nan", "inf", "1.x"])
def test_the_floor_is_a_ratio(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=rf"^--gate-floor {text}: give a speed-up from 0"):
        opened(tmp_path, json.dumps(made()), floor=text)


def test_bounds_and_defaults(tmp_path: Path) -> None:
    text = json.dumps(made())
    found = opened(tmp_path, text)
    assert (found.slack, found.floor) == (0.02, 0.9)
    found = opened(tmp_path, text, slack="0", floor="0", json_path=str(tmp_path / "new.json"))
    assert (found.slack, found.floor) == (0.0, 0.0)


def test_a_run_does_not_write_over_its_baseline(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "b.json")
    for name in ("b.json", "link.json", "./b.json"):
        with pytest.raises(UserError, match=r"^--json .* is the baseline of --gate"):
            opened(tmp_path, json.dumps(made()), json_path=f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"labels": ["none"]}, "--algorithms differs: none,x there, none here"),
        ({"labels": ["none", "x", "y"]}, "--algorithms differs: none,x there, none,x,y here"),
        ({"labels": ["x", "none"]}, "--algorithms differs: none,x there, x,none here"),
        ({"sizes": [1, 4]}, "--batch-sizes differs: 1 there, 1,4 here"),
        ({"sizes": [2]}, "--batch-sizes differs: 1 there, 2 here"),
        ({"fingerprint": "z", "file": "r.jsonl"}, "--prompts differs: p.jsonl there, r.jsonl with other prompts here"),
        ({"count": 3}, "the number of prompts differs: 2 there, 3 here"),
        ({"seed": 1}, "--seed differs: 0 there, 1 here"),
        ({"repeat": 1}, "--repeat differs: 3 there, 1 here"),
        ({"temperature": 0.5}, "--temperature differs: 0.0 there, 0.5 here"),
        ({"max_tokens": 32}, "--max-tokens differs: 64 there, 32 here"),
        ({"ignore_eos": True}, "--ignore-eos differs: False there, True here"),
        ({"random_input": 8}, "--random-input differs: None there, 8 here"),
    ],
)
def test_another_comparison_is_refused(what: dict[str, Any], said: str) -> None:
    labels, sizes = what.pop("labels", ["none", "x"]), what.pop("sizes", [1])
    with pytest.raises(UserError) as error:
        check_asked(gate(), labels, sizes, made()["prompts"] | what)
    assert str(error.value) == f"--gate b.json: {said}: give the same, or make a new baseline with --json"


def test_random_input_has_its_own_word_for_the_length_of_answers() -> None:
    report = changed("prompts/random_input", 8)
    with pytest.raises(UserError, match="--output-len differs: 64 there, 32 here"):
        check_asked(
            Gate("b.json", Report.model_validate(report)), ["none", "x"], [1], report["prompts"] | {"max_tokens": 32}
        )


def test_the_prompts_file_may_lie_elsewhere_and_columns_may_stand_in_another_order() -> None:
    check_asked(gate(), ["none", "x"], [1], made()["prompts"] | {"file": "elsewhere/p.jsonl"})
    report = changed("columns", {"none": {"algorithm": "none"}, "y": {"algorithm": "y"}, "x": {"algorithm": "lookup"}})
    report["batches"][0]["columns"]["y"] = report["batches"][0]["columns"]["x"]
    check_asked(Gate("b.json", Report.model_validate(report)), ["none", "x", "y"], [1], made()["prompts"])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"fingerprint": "g", "name": "n"}, "MODEL differs: m there, n with other weights here"),
        ({"dtype": "bfloat16"}, "--dtype differs: float32 there, bfloat16 here"),
        ({"device": "cuda:0"}, "--device differs: cpu there, cuda here"),
    ],
)
def test_another_model_is_refused(model: dict[str, Any], said: str) -> None:
    algorithms = {"none": "none", "x": "lookup"}
    check_planned(gate(), made()["model"] | {"name": "/elsewhere"}, algorithms)
    with pytest.raises(UserError, match=f"^--gate b.json: {said}: give the same"):
        check_planned(gate(), made()["model"] | model, algorithms)
    with pytest.raises(UserError, match="the algorithm of column x differs: lookup there, other here"):
        check_planned(gate(), made()["model"], algorithms | {"x": "other"})


def test_another_machine_is_said() -> None:
    host = made()["host"]
    assert host_warning(gate(), host | {"versions": {"torch": "2.13.0", "python": "3.13"}}) == ""
    assert host_warning(gate(), host | {"processor": "q", "threads": 4, "versions": {"torch": "2.14.0"}}) == (
        "--gate b.json was made with processor p (here q), threads 2 (here 4), torch 2.13.0 (here 2.14.0): "
        "logits may be rounded otherwise, and a text may part where two tokens are nearly tied"
    )
    assert "GPU none (here H200)" in host_warning(gate(), host | {"gpus": ["H200", "H200"]})
