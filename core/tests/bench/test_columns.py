"""What `specplug bench` compares: columns, prompts and batches."""

import json
from pathlib import Path

import pytest

from specplug.bench.columns import ColumnSpec, parse_columns
from specplug.bench.workload import from_conversations, random_sources, split
from specplug.cli.prompts import Conversation, read_prompts
from specplug.errors import UserError
from specplug.options import EngineOptions


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
