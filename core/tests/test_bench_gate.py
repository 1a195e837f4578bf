"""`specplug bench --gate`: every way in which a run can be worse than its baseline, and every file that is none."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specplug import cli
from specplug.bench import check, session
from specplug.bench.gate import (
    Gate,
    Parting,
    TextChanges,
    check_asked,
    check_planned,
    host_warning,
    judge,
    open_gate,
    text_changes,
)
from specplug.bench.identity import answer_rows, model_fingerprint, prompts_fingerprint
from specplug.bench.measure import Answer as Answered
from specplug.bench.measure import BatchRun, EngineColumn
from specplug.bench.report import Answer, Report, read_report
from specplug.bench.workload import Item, Source, from_conversations
from specplug.cli.prompts import Conversation
from specplug.errors import UserError
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.spec import Checkpoint
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer


def made() -> dict[str, Any]:
    """A report of two columns at one batch size, as far as it is read."""
    ledger = {"tokens_per_target_step": 2.0, "accept_length": 3.0, "draft_coverage": 0.5}
    plain = {"tokens_per_target_step": 1.0, "accept_length": 1.0, "draft_coverage": 0.0}
    text = {"faults": 0, "skipped": ""}
    column = {"ledger": ledger, "speed_up": {"decode": {"median": 1.5}}, "text": text}
    first = {"ledger": plain, "speed_up": {"decode": {"median": 1.0}}, "text": text}
    answers = [{"prompt": n, "turn": 0, "asked": f"a{n}", "ids": "1 2 3", "other": {}} for n in range(2)]
    report = {
        "host": {"processor": "p", "threads": 2, "gpus": [], "versions": {"torch": "2.13.0", "python": "3.11"}},
        "lossy": False,
        "model": {"name": "m", "fingerprint": "f", "dtype": "float32", "device": "cpu"},
        "prompts": {
            "file": "p.jsonl", "fingerprint": "q", "random_input": None, "count": 2, "seed": 0, "repeat": 3,
            "temperature": 0.0, "max_tokens": 64, "ignore_eos": False,
        },
        "columns": {"none": {"algorithm": "none"}, "x": {"algorithm": "lookup"}},
        "batches": [{"size": 1, "columns": {"none": first, "x": column}, "answers": answers}],
    }  # fmt: skip
    return json.loads(json.dumps(report))  # nothing is shared


def changed(where: str, value: Any) -> dict[str, Any]:
    """`made` with one value in another's place; a value of `...` leaves it out."""
    report: Any = made()
    at = report
    *parts, last = [int(part) if part.isdigit() else part for part in where.split("/")]
    for part in parts:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return report


X = "batches/0/columns/x"


def gate(**options: Any) -> Gate:
    return Gate("b.json", Report.model_validate(made()), **options)


def changes(report: dict[str, Any]) -> TextChanges:
    was, now = ([Answer.model_validate(row) for row in each["batches"][0]["answers"]] for each in (made(), report))
    return text_changes(1, ["none", "x"], was, now)


def worse(report: dict[str, Any], tie: float | None = None, **options: Any) -> list[str]:
    return list(judge(gate(**options), report, [changes(report)], tie).worse)


# --- what is worse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (made(), []),
        (changed(f"{X}/ledger/tokens_per_target_step", 1.96), []),
        (
            changed(f"{X}/ledger/tokens_per_target_step", 1.95),
            [
                "batch 1, x: 1.950 tokens per target step, was 2.000 "
                "(accept length 3.000, was 3.000; coverage 0.500, was 0.500)"
            ],
        ),
        # A drafter may trade one for the other: what they come to is judged.
        (changed(f"{X}/ledger/accept_length", 2.0), []),
        (changed(f"{X}/ledger/draft_coverage", 0.1), []),
        (changed(f"{X}/speed_up/decode/median", 0.9), []),
        (changed(f"{X}/speed_up/decode/median", 0.899), ["batch 1, x: speed-up 0.899, at least 0.9 is wanted"]),
        (
            changed(f"{X}/speed_up/decode", None),
            ["batch 1, x: speed-up unknown, as nothing was decoded, at least 0.9 is wanted"],
        ),
        # The first column is what it is measured against.
        (changed("batches/0/columns/none/speed_up/decode/median", 0.1), []),
        (
            changed("batches/0/answers/1/ids", "1 2 4"),
            ["batch 1, none, prompt 2, token 3: 4, was 3", "batch 1, x, prompt 2, token 3: 4, was 3"],
        ),
        (changed("batches/0/answers/1/other", {"x": "7 2 3"}), ["batch 1, x, prompt 2, token 1: 7, was 1"]),
        (changed("batches/0/answers/0/other", {"x": "1 2"}), ["batch 1, x, prompt 1, token 3: the end, was 3"]),
        (changed("batches/0/answers/0/other", {"x": "1 2 3 4"}), ["batch 1, x, prompt 1, token 4: 4, was the end"]),
        (changed("batches/0/answers/0/other", {"x": ""}), ["batch 1, x, prompt 1, token 1: the end, was 1"]),
        (
            changed("batches/0/answers/0/asked", "other"),
            ["batch 1, prompt 1: other tokens were asked: the tokenizer or the chat template is another"],
        ),
        (changed("batches/0/answers/1", ...), ["batch 1, prompt 2: is in the baseline only"]),
        (changed("batches/0/answers/1/turn", 1), [
            "batch 1, prompt 2: is in the baseline only",
        ]),
    ],
)  # fmt: skip
def test_what_is_worse_is_one_line_each(report: dict[str, Any], said: list[str]) -> None:
    assert worse(report) == said


def test_slack_and_floor_are_what_was_asked_for() -> None:
    slower = changed(f"{X}/ledger/tokens_per_target_step", 1.01)
    assert len(worse(slower, slack=0.49)) == 1
    assert worse(slower, slack=0.5) == []
    assert len(worse(changed(f"{X}/ledger/tokens_per_target_step", 1.999), slack=0.0)) == 1
    assert worse(made(), slack=0.0, floor=1.5) == []
    assert worse(made(), floor=1.6) == ["batch 1, x: speed-up 1.500, at least 1.6 is wanted"]
    for unknown in (None, {"median": 0.001}):
        assert worse(changed(f"{X}/speed_up/decode", unknown), floor=0.0) == []


def test_better_is_not_worse() -> None:
    report = changed(f"{X}/ledger/tokens_per_target_step", 4.0)
    report["batches"][0]["columns"]["x"]["speed_up"]["decode"]["median"] = 9.0
    assert worse(report) == []


def test_a_tie_passes_in_half_precision_only() -> None:
    at = [Parting(1, "x", 0, 0, 4, 5, 6, gap) for gap in (0.0, 0.25, 0.3, math.inf)]
    found = TextChanges(answers=4, partings=at)
    half = judge(gate(), made(), [found], 0.25)
    assert half.worse == (
        "batch 1, x, prompt 1, token 5: 6, was 5 (gap 3.0e-01)",
        "batch 1, x, prompt 1, token 5: 6, was 5",
    )
    assert (half.ties, half.largest_tie) == (2, 0.25)
    exact = judge(gate(), made(), [found], None)
    assert (len(exact.worse), exact.ties) == (4, 0)
    assert exact.worse[0].endswith("(gap 0.0e+00)")


def rows(*answers: tuple[int, int, str, str]) -> list[Answer]:
    return [Answer(prompt=prompt, turn=turn, asked=asked, ids=ids) for prompt, turn, asked, ids in answers]


def test_turns_after_another_answer_are_not_compared_but_counted() -> None:
    was = rows((0, 0, "a", "1 2"), (0, 1, "b", "3"), (0, 2, "c", "4"), (1, 0, "d", "5"))
    now = rows((0, 0, "a", "1 9"), (0, 1, "other", "8"), (1, 0, "d", "5"))
    found = text_changes(4, ["none", "x"], was, now)
    assert [parting.line() for parting in found.partings] == [
        "batch 4, none, prompt 1, token 2: 9, was 2",
        "batch 4, x, prompt 1, token 2: 9, was 2",
    ]
    assert (found.answers, found.following, found.lines) == (4, 4, [])
    # Another column's answer is not what the next turn follows.
    aside = [now[0].model_copy(update={"ids": (1, 2), "other": {"x": (1, 9)}}), *was[1:]]
    found = text_changes(4, ["none", "x"], was, aside)
    assert (len(found.partings), found.answers, found.following) == (1, 8, 0)
    late = [was[0], was[1].model_copy(update={"ids": (7,)}), *was[2:]]
    assert (
        text_changes(4, ["none"], was, late).partings[0].line() == "batch 4, none, prompt 1, turn 2, token 1: 7, was 3"
    )


def test_the_summary_says_how_much_was_compared() -> None:
    verdict = judge(gate(), made(), [changes(made())], None)
    assert verdict.summary(gate()) == "gate: as good as b.json: 4 answers compared"
    ties = replace(verdict, worse=("a", "b"), ties=2, largest_tie=0.125, following=3)
    assert ties.summary(gate()) == (
        "gate: 2 worse than b.json: 4 answers compared, 2 part at a tie (largest gap 1.2e-01), "
        "3 of later turns not compared, as an earlier turn parted"
    )
    assert ties.report(gate(slack=0.5))["worse"] == ["a", "b"]


# --- what cannot be compared -----------------------------------------------------------------------------------------


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


# --- what a report keeps ---------------------------------------------------------------------------------------------


def test_rows_hold_the_first_repetition_and_what_differs() -> None:
    def run(number: int, *ids: int, turn: int = 0) -> BatchRun:
        return BatchRun(answers=[Answered(Item(Source(number), turn, (9,), 0), list(ids), 1, 1.0, 1.0, None)])

    plain = [run(1, 1, 2), run(1, 8, 8), run(1, 4, turn=1), run(0)]
    other = [run(1, 1, 3), run(1, 1, 2), run(1, 4, turn=1), run(0)]
    asked = answer_rows({"a": [run(0)]})[0]["asked"]
    assert answer_rows({"none": plain, "x": other}) == [
        {"prompt": 0, "turn": 0, "asked": asked, "ids": "", "other": {}},
        {"prompt": 1, "turn": 0, "asked": asked, "ids": "1 2", "other": {"x": "1 3"}},
        {"prompt": 1, "turn": 1, "asked": asked, "ids": "4", "other": {}},
    ]


def test_prompts_are_told_apart_by_what_they_say() -> None:
    def fingerprint(*conversations: Conversation) -> str | None:
        return prompts_fingerprint(from_conversations(conversations, None, None))

    a, b = Conversation(text="a", category="x"), Conversation(turns=("a", "b"))
    assert fingerprint(a, b) == fingerprint(replace(a, category="y"), b) != fingerprint(b, a)
    assert fingerprint(a) != fingerprint(Conversation(text="b"))
    assert fingerprint(b) != fingerprint(Conversation(turns=("ab",)))
    assert fingerprint(Conversation(messages=({"role": "user", "content": "a"},))) not in (None, fingerprint(a))
    assert prompts_fingerprint([Source(0, ids=(1, 2))]) is None


def test_weights_are_told_apart_and_folders_are_not(tmp_path: Path) -> None:
    def fingerprint(name: str, weights: bytes, config: dict[str, Any], tensors: Any = ()) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        return model_fingerprint(Checkpoint(path=str(folder), config=config, tensors=None if tensors is None else {}))

    weights = bytes(range(256)) * 1000
    one = fingerprint("one", weights, {"a": 1})
    assert fingerprint("two", weights, {"a": 1}) == one
    assert fingerprint("longer", weights + b"\0", {"a": 1}) != one
    for at in (0, len(weights) - 1):
        trained = bytearray(weights)
        trained[at] ^= 1
        assert fingerprint(f"trained{at}", bytes(trained), {"a": 1}) != one
    # Without weights the config stands for them.
    dummy = fingerprint("dummy", weights, {"a": 1, "transformers_version": "5.17"}, None)
    assert fingerprint("dummy2", b"", {"a": 1, "transformers_version": "5.24"}, None) == dummy
    assert fingerprint("dummy3", weights, {"a": 2}, None) != dummy


# --- the command -----------------------------------------------------------------------------------------------------

LETTERS = tuple(range(ord("a"), ord("i")))
TEXTS = ("abcabc", "adadad", "bebebe")
ARGUMENTS = ("--max-tokens", 16, "--repeat", 1, "--gate-floor", 0)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return bench_registry(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer decoder on disk, with the byte tokenizer."""
    place = tmp_path_factory.mktemp("model")
    decoder_target(1, SIZE, folder=place, tokenizer=byte_tokenizer(), alphabet=LETTERS)
    return place


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


def edit(file: Path, where: str, value: Any) -> Any:
    """Change one value of a file, and return the old one."""
    report = at = json.loads(file.read_text())
    *parts, last = [int(part) if part.isdigit() else part for part in where.split("/")]
    for part in parts:
        at = at[part]
    old, at[last] = at[last], value
    file.write_text(json.dumps(report))
    return old


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
