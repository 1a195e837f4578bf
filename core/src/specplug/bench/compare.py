"""The interleaving: every column answers a batch before any column sees the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specplug.bench.measure import BatchRun, Column, EngineColumn, Sampling
from specplug.bench.workload import Item, Source
from specplug.errors import UserError

WARM_UP = 8
"""Tokens per answer of the warm-up."""


def compare(
    columns: Sequence[Column],
    batches: Sequence[Sequence[Source]],
    *,
    repeat: int,
    sampling: Sampling,
    seed: int,
    note: Callable[[str], None],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[BatchRun]]:
    """Run `batches` through all `columns`, `repeat` times each, and return each column's runs in the same order.

    The first column must be an engine's: it encodes the prompts, and a conversation goes on with its
    answers, so that every column gets the same tokens. Which column begins changes with every batch.
    `note` is told what had to be left out, `advance` of every run.
    """
    lead = columns[0]
    assert isinstance(lead, EngineColumn)
    items = [[_item(lead, source, 0, [], seed) for source in batch] for batch in batches]
    for each in items:
        for item in each:
            _check_fits(lead, item)
    for column in columns:
        column.run(items[0], {**sampling, "max_tokens": min(WARM_UP, sampling["max_tokens"])})
    runs: dict[str, list[BatchRun]] = {column.label: [] for column in columns}
    turn_count = 0
    for batch in items:
        turn: list[Item] = batch
        while turn:
            spoken: list[BatchRun] = []
            for _ in range(repeat):
                at = turn_count % len(columns)
                turn_count += 1
                for column in (*columns[at:], *columns[:at]):
                    run = column.run(turn, sampling)
                    runs[column.label].append(run)
                    if column is lead:
                        spoken.append(run)
                    advance()
            turn = _next_turn(lead, spoken[0], seed, note)
    return runs


def _item(lead: EngineColumn, source: Source, turn: int, answers: list[str], seed: int) -> Item:
    conversation = source.conversation
    ids = source.ids if conversation is None else tuple(lead.engine.encode(conversation.prompt(answers)))
    return Item(source, turn, ids, seed + source.number, tuple(answers))


def _check_fits(lead: EngineColumn, item: Item) -> None:
    most = lead.engine.max_tokens
    if not item.ids or len(item.ids) >= most:
        raise UserError(
            f"prompt {item.source.number + 1} has {len(item.ids)} tokens, and the context holds 1 to {most - 1} "
            "before the answer: take it out, or raise --context-length as far as the model allows"
        )


def _next_turn(lead: EngineColumn, run: BatchRun, seed: int, note: Callable[[str], None]) -> list[Item]:
    """Return the items that follow the lead's answers; a conversation that outgrows the context is left out, noted."""
    found = []
    tokenizer = lead.engine.target.tokenizer
    for answer in run.answers:
        item = answer.item
        if item.turn + 1 >= item.source.rounds:
            continue
        assert tokenizer is not None
        text = tokenizer.decode(answer.ids, skip_special_tokens=True)
        following = _item(lead, item.source, item.turn + 1, [*item.answers, text], seed)
        if len(following.ids) >= lead.engine.max_tokens:
            note(f"prompt {item.source.number + 1}: turn {item.turn + 2} does not fit the context and is left out")
        else:
            found.append(following)
    return found
