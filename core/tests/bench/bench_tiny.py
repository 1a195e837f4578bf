"""What the tests of `specplug bench` share: a request's options, items and runs made by hand."""

from collections.abc import Sequence

from specplug.bench.measure import Answer, BatchRun
from specplug.bench.workload import Item, Source

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def items(*prompts: Sequence[int]) -> list[Item]:
    """Prompts as a column is handed them, one row each."""
    return [Item(Source(at), 0, tuple(prompt), at) for at, prompt in enumerate(prompts)]


def answered(run: BatchRun, changed: dict[int, list[int]]) -> BatchRun:
    """The same run with other ids for some answers."""
    answers = [
        Answer(answer.item, changed.get(at, answer.ids), answer.head, answer.first, answer.last, None)
        for at, answer in enumerate(run.answers)
    ]
    return BatchRun(answers=answers)
