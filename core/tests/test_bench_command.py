"""`specplug bench`: what is compared, what is measured, and one line for every mistake."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug import cli
from specplug.bench import measure, session, table
from specplug.bench.baseline import TransformersColumn
from specplug.bench.check import TextCheck, check_texts, first_difference
from specplug.bench.columns import ColumnSpec, parse_columns
from specplug.bench.compare import compare
from specplug.bench.figures import figures, spread
from specplug.bench.floor import Floor, weight_bytes
from specplug.bench.measure import Answer, BatchRun, EngineColumn
from specplug.bench.workload import Item, Source, from_conversations, random_sources, split
from specplug.cli.prompts import Conversation, read_prompts
from specplug.errors import DrafterFailedError, UserError
from specplug.models.target import Target
from specplug.noise import gumbel
from specplug.options import EngineOptions
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.runtime.memory import DeviceMemory
from specplug.spec import StepStats
from specplug.testing.registry import bench_registry
from specplug.testing.targets import decoder_target, table_target
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer

LETTERS = tuple(range(ord("a"), ord("i")))
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


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
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without a tokenizer."""
    place = tmp_path_factory.mktemp("bare")
    decoder_target(2, 64, folder=place)
    return place


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "category": text[:1]} for text in ("abcabc", "adadad", "bebebe", "b")]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def bench(registry: Registry, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Registry, "discover", classmethod(lambda cls: registry))
    monkeypatch.setattr(session, "load_average", lambda: 0.0)

    def run(*args: object, model: Path | str = folder) -> tuple[int, str, str]:
        code = cli.main(["bench", str(model), *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def drafted(tmp_path: Path, registry: Registry, target: Target, prompts: Sequence[Sequence[int]]) -> Path:
    """Options with which the scripted drafter knows the greedy answers to `prompts`."""
    with Engine(target, registry=registry) as engine:
        results = engine.generate([list(prompt) for prompt in prompts], {"temperature": 0, "max_tokens": 48})
    texts = [[*prompt, *result.ids] for prompt, result in zip(prompts, results, strict=True)]
    path = tmp_path / "scripted.json"
    path.write_text(json.dumps({"scripted_texts": texts, "num_draft_tokens": 4}), encoding="utf-8")
    return path


# --- what is compared ------------------------------------------------------------------------------------------------


def test_columns_take_labels_and_files(tmp_path: Path) -> None:
    file = tmp_path / "wide.json"
    file.write_text('{"num_draft_tokens": 9}', encoding="utf-8")
    assert parse_columns(f"none, lookup ,fast=lookup@{file},lookup@{file}") == [
        ColumnSpec("none", "none"),
        ColumnSpec("lookup", "lookup"),
        ColumnSpec("fast", "lookup", {"num_draft_tokens": 9}),
        ColumnSpec("lookup@wide", "lookup", {"num_draft_tokens": 9}),
    ]


def test_a_columns_file_holds_engine_options_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "head.json"
    given = {"num_draft_tokens": 3, "speculative_draft_model_path": "head", "speculative_adaptive": True}
    file.write_text(json.dumps(given), encoding="utf-8")
    plain, head = parse_columns(f"none,head=a@{file}")
    assert head.config == {"num_draft_tokens": 3}
    shared = EngineOptions(page_size=4, speculative_draft_model_path="all", speculative_draft_model_revision="v1")
    assert plain.engine_options(shared) is shared
    own = head.engine_options(shared)
    assert (own.page_size, own.speculative_draft_model_path, own.speculative_adaptive) == (4, "head", True)
    assert own.speculative_draft_model_revision is None  # that was of another draft model
    assert ColumnSpec("x", "a", {}, {"speculative_draft_load_format": "dummy"}).engine_options(shared) == (
        shared.model_copy(update={"speculative_draft_load_format": "dummy"})
    )
    assert ColumnSpec("x", "a", {}, {"speculative_draft_model_path": None}).engine_options(shared) == (
        EngineOptions(page_size=4)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"draft_model_path": "x"}, "draft_model_path is written speculative_draft_model_path in a column's file"),
        ({"speculative_acceptance": "rejection"}, "holds for all columns: .* give --speculative-acceptance"),
        ({"on_failure": "stop"}, "on_failure holds for all columns: .* give --speculative-on-failure"),
        ({"speculative_draft_load_format": "x"}, "--speculative-draft-load-format x: must be one of auto, dummy"),
    ],
)
def test_other_engine_options_in_a_columns_file_are_refused(
    given: dict[str, object], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(given), encoding="utf-8")
    with pytest.raises(UserError, match=f"^--algorithms b: .*{said}") as error:
        parse_columns(f"b=a@{file}")[0].engine_options(EngineOptions())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none,,a", "'' names no algorithm"),
        ("", "'' names no algorithm"),
        ("x=", "'x=' names no algorithm"),
        ("a@", "'a@' names no file"),
        ("a,a", "two columns are called 'a'"),
        ("=a", "the label '' is no word"),
        ("b c=a", "the label 'b c' is no word"),
        ("transformers-x=a", "begins with 'transformers'"),
        ("a@missing.json", "a@missing.json: @missing.json: cannot read the file"),
    ],
)
def test_bad_columns_are_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")) as error:
        parse_columns(text)
    assert str(error.value).startswith("--algorithms ")
    assert "\n" not in str(error.value)


def test_prompts_of_a_file_keep_their_category(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 81, "category": "qa", "turns": ["a", "b"]}\n{"turns": ["c"]}', encoding="utf-8")
    first, second = read_prompts(str(path))
    assert (first.category, first.rounds, second.category) == ("qa", 2, "")


def test_limits_count_in_all_and_per_category() -> None:
    conversations = [Conversation(text="x", category=category) for category in "aaabbbc"]
    assert [source.category for source in from_conversations(conversations, None, 2)] == list("aabbc")
    assert [source.category for source in from_conversations(conversations, 3, 2)] == list("aab")
    assert [source.number for source in from_conversations(conversations, None, 1)] == [0, 1, 2]


def test_random_prompts_follow_the_seed_and_avoid_what_ends_an_answer() -> None:
    made = random_sources(4, 200, 5, 7, exclude=[3])
    assert made == random_sources(4, 200, 5, 7, exclude=[3])
    assert made != random_sources(4, 200, 5, 8, exclude=[3])
    assert {token for source in made for token in source.ids} == {0, 1, 2, 4}


def test_batches_are_full_ones() -> None:
    sources = random_sources(5, 1, 9, 0)
    batches, left = split(sources, 2)
    assert ([len(batch) for batch in batches], left) == ([2, 2], 1)
    with pytest.raises(UserError, match="--batch-sizes 6: there are only 5 prompts"):
        split(sources, 6)


# --- how it is measured ----------------------------------------------------------------------------------------------


def items(*prompts: Sequence[int]) -> list[Item]:
    return [Item(Source(at), 0, tuple(prompt), at) for at, prompt in enumerate(prompts)]


def test_prefill_and_decode_are_told_apart(registry: Registry) -> None:
    target = table_target(32, 2, 1)
    with Engine(target, registry=registry, page_size=4) as engine:
        column = EngineColumn("none", engine)
        run = column.run(items([1, 2], [4]), GREEDY)
        assert [len(answer.ids) for answer in run.answers] == [12, 12]
        # The first tokens are the prompts' own forwards'.
        assert (run.prompt_tokens, run.decode_tokens, run.steps, run.rows, run.width) == (3, 22, 11, 22, 22)
        assert {answer.head for answer in run.answers} == {1}
        assert run.prefill_seconds > 0
        assert sum(run.stages.values()) == pytest.approx(run.decode_seconds)
        # 2 + 11 tokens in the KV are 4 pages of 4, 1 + 11 are 3; the fourth is taken and given back in the last step.
        assert run.peak_pages == 7
        assert engine.free_pages == engine.pages


def test_a_failed_drafter_ends_the_comparison(registry: Registry) -> None:
    config = {"scripted_behaviour": "raise_propose", "scripted_texts": [[1, 2, 3]]}
    engine = Engine(table_target(32), algorithm="scripted", config=config, registry=registry)
    with engine, pytest.raises(DrafterFailedError, match="bad: failed"):
        EngineColumn("bad", engine).run(items([1]), GREEDY)


class Recorder:
    """A column that remembers the order of its batches in a list shared with others."""

    def __init__(self, label: str, inner: EngineColumn, log: list[str]) -> None:
        self.label, self.inner, self.log = label, inner, log

    def cannot(self, size: int) -> str:
        return ""

    def run(self, items: Sequence[Item], sampling: Any) -> BatchRun:
        self.log.append(f"{self.label}{items[0].turn}")
        return self.inner.run(items, sampling)


def test_columns_take_turns_and_later_turns_follow_the_first_column(registry: Registry) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    target = table_target(SIZE, 2, 1, tokenizer=tokenizer, alphabet=LETTERS)
    sources = from_conversations([Conversation(turns=("hi", "go")), Conversation(text="ab")], None, None)
    log: list[str] = []
    with Engine(target, registry=registry) as engine:
        lead = EngineColumn("a", engine)
        other = Recorder("b", lead, log)
        runs = compare([lead, other], [sources], repeat=2, sampling=GREEDY, seed=3, note=log.append)
    # The warm-up is no run; of the second turn only the conversation is left.
    assert log == ["b0", "b0", "b0", "b1", "b1"]
    assert [len(run.answers) for run in runs["a"]] == [2, 2, 1, 1]
    for mine, theirs in zip(runs["a"], runs["b"], strict=True):
        assert [answer.item for answer in mine.answers] == [answer.item for answer in theirs.answers]
    said = tokenizer.decode(runs["a"][0].answers[0].ids)
    assert bytes(runs["a"][2].answers[0].item.ids).decode() == f"uhia{said}ugo"
    assert [answer.item.seed for answer in runs["a"][0].answers] == [3, 4]


def test_the_order_rotates(registry: Registry) -> None:
    log: list[str] = []
    with Engine(table_target(32), registry=registry) as engine:
        lead = EngineColumn("lead", engine)
        columns = [lead, Recorder("b", lead, log), Recorder("c", lead, log)]
        compare(columns, [random_sources(1, 4, 32, 0)], repeat=3, sampling=GREEDY, seed=0, note=log.append)
    assert log == ["b0", "c0", *("b0", "c0"), *("b0", "c0"), *("c0", "b0")]


def test_a_turn_that_outgrows_the_context_is_left_out_and_said(registry: Registry) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    target = table_target(SIZE, 2, 1, tokenizer=tokenizer, alphabet=LETTERS)
    sources = from_conversations([Conversation(turns=("a", "b" * 20))], None, None)
    notes: list[str] = []
    with Engine(target, registry=registry, context_length=24) as engine:
        runs = compare([EngineColumn("a", engine)], [sources], repeat=1, sampling=GREEDY, seed=0, note=notes.append)
    assert len(runs["a"]) == 1
    assert notes == ["prompt 1: turn 2 does not fit the context and is left out"]
    long = from_conversations([Conversation(text="a" * 24)], None, None)
    with (
        Engine(target, registry=registry, context_length=24) as engine,
        pytest.raises(UserError, match="prompt 1 has 24"),
    ):
        compare([EngineColumn("a", engine)], [long], repeat=1, sampling=GREEDY, seed=0, note=notes.append)


# --- figures ---------------------------------------------------------------------------------------------------------


def made(speeds: Sequence[tuple[int, float]], category: str = "") -> list[BatchRun]:
    """Runs of one answer each: (tokens after the first, seconds)."""
    return [
        BatchRun(
            answers=[Answer(Item(Source(at, category), 0, (1,) * 10, 0), [1] * (n + 1), 1, 1.0, 1.0 + time, None)],
            prompt_tokens=10,
            prefill_seconds=1.0,
            decode_tokens=n,
            decode_seconds=time,
            steps=n,
            rows=n,
            width=n,
            stages={"forward": time},
        )
        for at, (n, time) in enumerate(speeds)
    ]


def test_speed_up_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    # The second batch met a busy machine on both sides; ratios are 2, 2 and 4.
    found = figures({"none": made([(10, 10), (10, 100), (10, 20)]), "x": made([(10, 5), (10, 50), (10, 5)])}, None)
    assert found["x"]["speed_up"]["decode"] == {"count": 3, "median": 2.0, "q1": 2.0, "q3": 3.0}
    assert found["x"]["speed_up"]["decode_total"] == pytest.approx(130 / 60)
    assert found["none"]["speed_up"]["decode"]["median"] == 1.0
    # A second of prefill on both sides: 11 / 6, 101 / 51 and 21 / 6.
    assert found["x"]["speed_up"]["with_prefill"]["median"] == pytest.approx(101 / 51)
    assert found["x"]["decode"]["tpot_ms"]["median"] == 500.0


def test_figures_over_nothing_are_none_and_json_can_hold_them() -> None:
    found = figures({"none": made([(0, 0.0)]), "x": made([(0, 0.0)])}, None)
    assert found["x"]["decode"]["tokens_per_second"] is None
    assert found["x"]["speed_up"]["decode"] is None
    assert found["none"]["ledger"] is None
    json.dumps(found, allow_nan=False)


def test_a_devices_idle_time_and_graphs_are_medians_and_shares_of_decode_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stats = StepStats(2, 2, 0, 0, 2, 0, 0, 0, {"forward": 0.001, "wait": 0.002})
    run = made([(2, 1.0)])[0]
    run.stages = {}
    for exposed, graph in ((0.0001, True), (None, True), (0.0005, False), (0.0002, True)):
        measure._add(run, replace(stats, exposed=exposed, graph=graph), 0.004)
    found = figures({"gpu": [run], "cpu": made([(2, 1.0)])}, None)
    steps = found["gpu"]["steps"]
    assert steps["exposed_ms"] == {"count": 3, "median": pytest.approx(0.2), "q1": pytest.approx(0.15), "q3": 0.35}
    assert steps["graph_share"] == 0.75
    assert (found["cpu"]["steps"]["exposed_ms"], found["cpu"]["steps"]["graph_share"]) == (None, None)
    # What the device was waited for is the verify's.
    assert steps["time_share"]["verify"] == pytest.approx(0.75)
    for column in found.values():
        column["pages"] = 1
    out = table.console(stderr=False)
    out.print(table._host({"gpu": found["gpu"]}))
    said = capsys.readouterr().out
    assert "exposed" in said
    assert "0.200" in said
    run.exposed, run.graphed = [], []
    quiet = figures({"cpu": [run]}, None)
    quiet["cpu"]["pages"] = 1
    table.console(stderr=False).print(table._host(quiet))
    assert "exposed" not in capsys.readouterr().out


def test_spread() -> None:
    assert spread([]) is None
    assert spread([None, 3.0]) == {"count": 1, "median": 3.0, "q1": 3.0, "q3": 3.0}
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"count": 5, "median": 3.0, "q1": 2.0, "q3": 4.0}


def test_categories_pair_requests() -> None:
    base = made([(10, 10)], "qa") + made([(10, 30)], "code")
    fast = made([(10, 5)], "qa") + made([(10, 10)], "code")
    found = figures({"none": base, "x": fast}, None)["x"]["categories"]
    assert {name: each["speed_up"]["median"] for name, each in found.items()} == {"qa": 2.0, "code": 3.0}
    assert figures({"none": made([(1, 1)])}, None)["none"]["categories"] == {}


def test_share_of_floor() -> None:
    # A step must read 100 + 15.5 * 2 bytes at 1000 a second, so 131 ms; it took 1 s.
    found = figures({"none": made([(10, 10)])}, Floor(weights=100, kv=2, bandwidth=1000.0))
    assert found["none"]["decode"]["share_of_floor"] == pytest.approx(0.131)


def test_an_embedding_with_a_head_of_its_own_is_not_read_whole() -> None:
    target = decoder_target(1, 64)
    every = sum(parameter.nbytes for parameter in target.model.parameters())
    assert weight_bytes(target) == every - 64 * 32 * 4
    assert weight_bytes(table_target(8)) == 0


# --- text ------------------------------------------------------------------------------------------------------------


def test_first_difference() -> None:
    assert [first_difference([1, 2, 3], other) for other in ([9], [1, 9], [1, 2], [1, 2, 3, 4])] == [0, 1, 2, 3]


def answered(run: BatchRun, changed: dict[int, list[int]]) -> BatchRun:
    """The same run with other ids for some answers."""
    answers = [
        Answer(answer.item, changed.get(at, answer.ids), answer.head, answer.first, answer.last, None)
        for at, answer in enumerate(run.answers)
    ]
    return BatchRun(answers=answers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_changed_text_is_a_fault_unless_it_is_a_tie(registry: Registry, temperature: float) -> None:
    target = table_target(32, 2, 1)
    sampling = {**GREEDY, "temperature": temperature}
    with Engine(target, registry=registry) as engine:
        run = EngineColumn("a", engine).run(items([1, 2, 3], [4, 5]), sampling)
        ids = run.answers[1].ids
        other = answered(run, {1: [*ids[:4], (ids[4] + 1) % 32, *ids[5:]]})
        shorter = answered(run, {0: run.answers[0].ids[:5]})
        found = check_texts({"a": [run], "b": [other], "c": [shorter]}, engine, sampling, "float32")
        assert engine.free_pages == engine.pages
        # Both tokens are certain to be ties where the table has one row for all.
        flat = Engine(table_target(32, 1, 1, ties=True), registry=registry)
        flat.target.model.table[:] = 0.0
        same = EngineColumn("flat", flat).run(items([1]), GREEDY)
        ties = check_texts(
            {"flat": [same], "d": [answered(same, {0: [5, *same.answers[0].ids[1:]]})]}, flat, GREEDY, "float32"
        )
    assert (found["a"].verdict, found["a"].answers) == ("identical", 2)
    assert (found["b"].different, found["b"].faults) == (1, 1)
    # The gap is one of the values that decided: logits of the table, and for a sampled row the noise of that place.
    prefix = [4, 5, *ids[:4]]
    values = target.model.table[prefix[-2] * 32 + prefix[-1]].clone()
    if temperature:
        values += gumbel(1, 0, len(prefix), "target", 32)
    assert int(values.argmax()) == ids[4]
    assert found["b"].gaps == [pytest.approx(float(values.max() - values[(ids[4] + 1) % 32]))]
    assert found["b"].verdict.startswith("DIFFERENT 1/2")
    assert found["c"].gaps == [math.inf]
    assert found["c"].report()["gaps"] == [None]
    assert (ties["d"].faults, ties["d"].verdict) == (0, "ties 1/1, gap 0.0e+00")


def test_texts_that_may_differ_are_not_compared() -> None:
    assert TextCheck(skipped="because").verdict == "not compared"


# --- transformers ----------------------------------------------------------------------------------------------------


def test_transformers_columns_say_what_ours_say(bench: Any, prompts: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, _, err = bench(
        "--algorithms", "none", "--prompts", prompts, "--max-tokens", 16, "--batch-sizes", "1,2", "--repeat", 1,
        "--transformers", "--speculative-draft-model-path", folder, "--json", out,
    )  # fmt: skip
    assert code == 0, err
    one, two = json.loads(out.read_text())["batches"]
    names = ["none", "transformers", "transformers-lookup", "transformers-assisted"]
    assert list(one["columns"]) == names
    assert list(two["columns"]) == names[:2]  # it drafts for one row only
    for batch in (one, two):
        assert {column["text"]["verdict"] for column in batch["columns"].values()} == {"identical"}
    # Its own counts: as many tokens after the first step's as ours, of the prompts without drafts.
    assert one["columns"]["transformers"]["decode"]["tokens"] == one["columns"]["none"]["decode"]["tokens"]


def test_transformers_columns_stop_at_the_end_of_text() -> None:
    class Model:
        def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
            for step in range(4):
                options["stopping_criteria"][0](torch.zeros(2, ids.shape[1] + step + 1), None)
            assert ids.tolist() == [[7, 1], [2, 3]]
            assert options["attention_mask"].tolist() == [[0, 1], [1, 1]]
            return torch.cat((ids, torch.tensor([[5, 7, 7, 7], [5, 5, 5, 5]])), 1)

    column = TransformersColumn("transformers", Model(), [7])
    run = column.run(items([1], [2, 3]), {"max_tokens": 4, "temperature": 0.0})
    assert [answer.ids for answer in run.answers] == [[5, 7], [5, 5, 5, 5]]
    assert (run.decode_tokens, run.steps) == (4, 3)
    assert run.answers[0].last < run.answers[1].last
    assert column.cannot(8) == ""
    assert TransformersColumn("x", Model(), [7], lookup=3).cannot(2)


# --- the command -----------------------------------------------------------------------------------------------------


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
