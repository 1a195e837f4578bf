"""How `specplug bench` measures: prefill apart from decode, columns in turns."""

from collections.abc import Sequence
from typing import Any

import pytest
from bench_tiny import GREEDY, items

from specplug.bench.compare import compare
from specplug.bench.measure import BatchRun, EngineColumn
from specplug.bench.workload import Item, from_conversations, random_sources
from specplug.cli.prompts import Conversation
from specplug.errors import DrafterFailedError, UserError
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.testing.bench import LETTERS
from specplug.testing.targets import table_target
from specplug.testing.tokenizer import SIZE, byte_tokenizer


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
