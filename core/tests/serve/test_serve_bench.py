"""`specplug bench --url`: load on a running server, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specplug import cli
from specplug.bench.load import Timing
from specplug.bench.url import figures, percentiles


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": "abcabc"}, {"turns": ["ab", "cd"]}, {"prompt": "dad", "category": "x"}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.parametrize("level", [("--batch-sizes", "1,3"), ("--request-rate", "200")])
def test_load_on_a_server(
    serving: Any, prompts: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, level: tuple[str, str]
) -> None:
    monkeypatch.setenv("SPECPLUG_API_KEY", "let-me-in")
    place = tmp_path / "report.json"
    code = cli.main(
        [
            *("bench", "--url", f"{serving.url}/v1", "--prompts", str(prompts), "--max-tokens", "6", "--repeat", "2"),
            *("--ignore-eos", "--json", str(place), *level),
        ]
    )
    out = capsys.readouterr().out
    assert code == 0, out
    report = json.loads(place.read_text())
    assert report["model"] == "tiny"
    loads = report["loads"]
    assert len(loads) == level[1].count(",") + 1
    for each in loads:
        assert each["requests"] == 8  # 4 turns, twice
        assert each["failed"] == 0
        assert each["output_tokens"] == 48
        assert each["ledger"]["output_tokens"] == 48
        assert each["ledger"]["requests"] == 8
        assert each["ttft_ms"]["count"] == each["tpot_ms"]["count"] == 8
        assert 0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p90"] <= each["whole_ms"]["p99"]
    assert "TTFT" in out
    assert "tokens per forward" in out


def test_a_server_that_refuses(serving: Any, prompts: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPLUG_API_KEY", "wrong")
    base = ["bench", "--url", serving.url, "--prompts", str(prompts), "--repeat", "1"]
    assert cli.main([*base, "tiny"]) == 1
    assert "HTTP 401: the API key is missing or wrong" in capsys.readouterr().out
    assert cli.main(base) == 2
    assert "does not list a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--url", "localhost:8000"], "--url localhost:8000: write the server's address"),
        (["--url", "http://127.0.0.1:9"], "nobody answers there"),
        (["--url", "http://127.0.0.1:9", "--request-rate", "0"], "--request-rate 0: give numbers above 0"),
        (["--url", "http://127.0.0.1:9", "--batch-sizes", "0"], "--batch-sizes 0"),
        (["--url", "http://127.0.0.1:9", "--temperature", "-1"], "--temperature -1"),
        (["--url", "http://127.0.0.1:9", "--page-size", "4"], "--page-size with --url"),
        (["--url", "http://127.0.0.1:9", "--algorithms", "none"], "--algorithms with --url"),
        (["--request-rate", "2"], "--request-rate 2 is for a running server"),
        ([], "MODEL is missing"),
    ],
)
def test_a_mistake_is_one_line(prompts: Path, capsys: Any, args: list[str], said: str) -> None:
    assert cli.main(["bench", "--prompts", str(prompts), *args]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("error: ") == 1


def test_percentiles_and_failures() -> None:
    assert percentiles([]) is None
    assert percentiles(range(1, 101)) == {"count": 100, "p50": 50, "p90": 90, "p99": 99}
    good = Timing(due=1.0, first=1.5, last=2.5, gaps=[0.5, 0.5], tokens=3)
    found = figures([good, Timing(due=1.0, error="HTTP 503: full", tokens=9)], 2.0)
    assert (found["failed"], found["output_tokens"], found["tokens_per_second"]) == (1, 3, 1.5)
    assert found["ttft_ms"]["p50"] == 500
    assert found["tpot_ms"]["p50"] == 500
    assert found["errors"] == ["HTTP 503: full"]
