"""The check that all columns say the same, transformers' among them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_tiny import GREEDY, answered, items

from specplug.bench.baseline import TransformersColumn
from specplug.bench.check import TextCheck, check_texts, first_difference
from specplug.bench.measure import EngineColumn
from specplug.noise import gumbel
from specplug.registry import Registry
from specplug.runtime.engine import Engine
from specplug.testing.targets import table_target


def test_first_difference() -> None:
    assert [first_difference([1, 2, 3], other) for other in ([9], [1, 9], [1, 2], [1, 2, 3, 4])] == [0, 1, 2, 3]


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
