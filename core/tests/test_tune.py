"""`specplug tune`, and `specplug estimate --from` what it wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specplug import cli
from specplug.adaptive.config import Measured, read_adaptive
from specplug.adaptive.policy import Decision, Result, Round
from specplug.adaptive.tuning import Cell, Tuned, tune, write
from specplug.adaptive.watching import Watching, chance, length, shares
from specplug.bench.workload import Source
from specplug.cli.prompts import Conversation
from specplug.errors import UserError
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target, table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer

LETTERS = tuple(range(ord("a"), ord("i")))
SAMPLING = {"max_tokens": 12, "temperature": 0.0}
Cells = Sequence[Cell]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"))


def sources(*texts: str) -> list[Source]:
    return [Source(at, conversation=Conversation(text=text)) for at, text in enumerate(texts)]


def engine_for(registry: Registry, behaviour: str = "right") -> Engine:
    target = table_target(SIZE, 2, 1, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    with Engine(target, context_length=64) as plain:
        texts = ["abcd", "bcde", "cdef", "efgh"]
        ids = [plain.encode(text) for text in texts]
        known = [
            (*one, *result.ids)
            for one, result in zip(ids, plain.generate(texts, {"max_tokens": 40, "temperature": 0}), strict=True)
        ]
    return Engine(
        target,
        algorithm="scripted",
        config={"num_draft_tokens": 3, "scripted_behaviour": behaviour, "scripted_texts": known},
        registry=registry,
        context_length=64,
        max_running_requests=2,
        speculative_adaptive=True,
        speculative_adaptive_policy="cost",
    )


def test_every_depth_is_measured_at_every_batch_size(registry: Registry) -> None:
    # Breaks with: drafts counted under the depth that came after them, warm-up rounds counted.
    with engine_for(registry) as engine:
        found = tune(
            engine,
            sources("abcd", "bcde", "cdef", "efgh"),
            batches=[1, 2],
            depths=[0, 1, 2],
            sampling=SAMPLING,
            repeat=1,
            seed=0,
        )
    assert [(cell.batch, cell.depth) for cell in found.cells] == [(size, at) for size in (1, 2) for at in (0, 1, 2)]
    for cell in found.cells:
        assert cell.accept_length == pytest.approx(1 + cell.depth, abs=0.25)
        assert cell.iteration_ms > 0
        assert cell.tokens_per_second > 0
        assert cell.depth or cell.speed_up == 1.0
    policy = engine._built.drafting.policy  # type: ignore[union-attr]
    assert isinstance(policy, Watching)
    assert len(policy._between[1, 0]) == 4 * 10, "4 prompts of 11 rounds, of which the first follows the prompt"
    measured = found.measured
    assert {(rows, depth) for rows, depth, _ in measured["draft_ms"]} == {(a, b) for a in (1, 2) for b in (0, 1, 2)}
    assert {(1, 1), (1, 2), (1, 3), (2, 2)} <= {(rows, tokens) for rows, tokens, _ in measured["verify_ms"]}
    assert measured["acceptance"] == [[1, [1.0, 1.0]], [2, [1.0, 1.0]]]


def test_wrong_drafts_show(registry: Registry) -> None:
    with engine_for(registry, "wrong") as engine:
        found = tune(engine, sources("abcd"), batches=[1], depths=[0, 2], sampling=SAMPLING, repeat=1, seed=0)
    assert found.cells[1].accept_length == 1.0
    assert found.measured["acceptance"] == [[1, [0.0]]]


def test_a_prompt_that_does_not_fit_is_named(registry: Registry) -> None:
    with engine_for(registry) as engine, pytest.raises(UserError, match="prompt 2 has 80 tokens"):
        tune(engine, sources("a", "b" * 80), batches=[1], depths=[0], sampling=SAMPLING, repeat=1, seed=0)


def cell(batch: int, depth: int, speed: float) -> Cell:
    return Cell(batch, depth, 1.0 + depth, 10.0, speed, speed / 100.0)


def test_recommended_is_the_fastest_unless_it_gains_nothing() -> None:
    tuned = Tuned([cell(1, 0, 100), cell(1, 2, 180), cell(1, 4, 210), cell(8, 0, 100), cell(8, 2, 102)], {})
    assert tuned.best(1).depth == 4
    assert tuned.best(8).depth == 0
    assert [(tier.least, tier.candidates) for tier in tuned.tiers()] == [(1, (2, 4)), (8, (0, 2))]


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    measured = Measured({(1, 1): 0.01}, {(1, 0): 0.001, (1, 2): 0.002}, {1: [0.5]})
    tuned = Tuned([cell(1, 0, 100), cell(1, 2, 180)], measured.as_json())
    write(str(tmp_path / "o.json"), tuned)
    found = read_adaptive(str(tmp_path / "o.json"))
    assert found.measured == measured
    assert found.tiers == tuned.tiers()
    assert json.loads((tmp_path / "o.json").read_text())["measured"]["table"][1]["depth"] == 2


def test_only_rounds_of_the_present_depth_are_kept() -> None:
    watching = Watching([1, 2, 4])
    watching.depth = 2
    watching.observe(Round(1, 3, [Result(0, Decision(1), 1, 1, 1)], 1.0, 1.0))
    assert watching.measured() == Measured()
    for seconds in (1.0, 2.0, 9.0):
        watching.observe(Round(3, 9, [Result(at, Decision(2), 2, 2, at) for at in range(3)], seconds, seconds))
    found = watching.measured()
    assert found.verify == {(4, 10): 2.0}
    assert found.draft == {(4, 2): 2.0}
    assert found.acceptance == {4: [pytest.approx(2 / 3), 0.5]}
    assert watching.accept_length(3, 2) == 2.0


def test_shares_and_lengths() -> None:
    assert shares([(3, 0), (3, 1), (1, 1), (3, 3)], 3) == [0.75, 0.5, 1.0]
    assert length([0.5, 0.5], 2) == 1.75
    assert length([0.5], 3) == 1.875
    assert chance(length([0.7], 5), 5) == pytest.approx(0.7)
    assert chance(1.0, 4) == pytest.approx(0.0)


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    decoder_target(1, SIZE, folder=place, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    (place / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "bcd")))
    return place


def run(monkeypatch: pytest.MonkeyPatch, registry: Registry, *args: str) -> int:
    monkeypatch.setattr(Registry, "discover", lambda *given, **more: registry)
    return cli.main(list(args))


def test_the_command_prints_writes_and_is_read_by_estimate(
    monkeypatch: pytest.MonkeyPatch, registry: Registry, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    out = str(tmp_path / "o.json")
    prompts = str(folder / "p.jsonl")
    words = ["tune", str(folder), "--speculative-algorithm", "scripted", "--speculative-num-draft-tokens", "3"]
    more = [
        "--prompts",
        prompts,
        "--batch-sizes",
        "1,2",
        "--max-tokens",
        "8",
        "--repeat",
        "1",
        "--context-length",
        "32",
    ]
    assert run(monkeypatch, registry, *words, *more, "--output", out) == 0
    said = capsys.readouterr().out
    assert "iteration ms" in said
    assert "batch 2: " in said
    assert f"--speculative-adaptive-config {out}" in said
    assert run(monkeypatch, registry, "estimate", "--from", out, "--batch-size", "2") == 0
    assert "speed-up" in capsys.readouterr().out
    model = [str(folder), "--speculative-num-draft-tokens", "3", "--json"]
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-policy", "cost", "--speculative-adaptive-config", out]
    assert run(monkeypatch, registry, "doctor", "scripted", *model, *adaptive) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["adaptive"]["policy"] == "cost"
    assert report["adaptive"]["drafts_by_depth"] == {"0": 0, "1": 1, "2": 2}


MISTAKES = {
    "no algorithm": (["--prompts", "P"], "--speculative-algorithm is missing"),
    "no prompts": (["--speculative-algorithm", "scripted"], "--prompts FILE is missing"),
    "too few": (["--speculative-algorithm", "scripted", "--prompts", "P", "--batch-sizes", "3"], "has 2 prompts"),
    "sizes": (["--speculative-algorithm", "scripted", "--prompts", "P", "--batch-sizes", "0"], "from 1 to 4096"),
    "depths": (
        ["--speculative-algorithm", "scripted", "--prompts", "P", "--depths", "0,9"],
        "--depths 9: with these options there are 0, 1, 2, 3, 4, 5",
    ),
    "slots": (
        ["--speculative-algorithm", "scripted", "--prompts", "P", "--batch-sizes", "2", "--max-running-requests", "1"],
        "--max-running-requests 1 is below --batch-sizes 2",
    ),
    "output": (
        ["--speculative-algorithm", "scripted", "--prompts", "P", "--output", "/none/o.json"],
        "--output /none/o.json: cannot be written there",
    ),
    "tokens": (["--speculative-algorithm", "scripted", "--prompts", "P", "--max-tokens", "2"], "give at least 4"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, registry: Registry, folder: Path, capsys: Any, mistake: str
) -> None:
    words, said = MISTAKES[mistake]
    words = [str(folder / "p.jsonl") if word == "P" else word for word in words]
    assert run(monkeypatch, registry, "tune", str(folder), *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("error:") == 1


def test_estimate_needs_numbers_or_a_file_with_measurements(
    monkeypatch: pytest.MonkeyPatch, registry: Registry, tmp_path: Path, capsys: Any
) -> None:
    assert run(monkeypatch, registry, "estimate", "--alpha", "0.5") == 2
    assert "--num-steps is missing: give it, or --from a file" in capsys.readouterr().err
    (tmp_path / "o.json").write_text('{"1": {"candidate_steps": [1]}}')
    assert run(monkeypatch, registry, "estimate", "--from", str(tmp_path / "o.json")) == 2
    assert "it holds no measurements" in capsys.readouterr().err


def test_estimate_takes_what_is_typed_over_the_file(
    monkeypatch: pytest.MonkeyPatch, registry: Registry, tmp_path: Path, capsys: Any
) -> None:
    measured = Measured({(1, 1): 0.010}, {(1, 0): 0.0, (1, 4): 0.008}, {1: [0.7]})
    text = {"1": {"candidate_steps": [4]}, "measured": measured.as_json()}
    (tmp_path / "o.json").write_text(json.dumps(text))
    assert run(monkeypatch, registry, "estimate", "--from", str(tmp_path / "o.json")) == 0
    said = capsys.readouterr().out
    assert "time per verify    18.00 ms" in said
    assert "tokens per verify  2.77" in said
    assert run(monkeypatch, registry, "estimate", "--from", str(tmp_path / "o.json"), "--alpha", "1") == 0
    assert "tokens per verify  5.00" in capsys.readouterr().out
