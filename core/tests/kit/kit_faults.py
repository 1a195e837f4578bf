"""Faults of the core: each takes the real function and returns one that is wrong as its docstring says."""

from dataclasses import replace
from typing import Any


def leaky(release: Any) -> Any:
    """One page of every request is lost."""

    def faulty(self: Any, slot: int) -> None:
        self.held[slot] -= 1
        release(self, slot)

    return faulty


def keeps_failed(release: Any) -> Any:
    """One page of every failed request is lost."""

    def faulty(self: Any, request: Any) -> None:
        if request.slot >= 0 and request.output.finish_reason == "error":
            self._pages.held[request.slot] -= 1
        release(self, request)

    return faulty


def overcounted(add_round: Any) -> Any:
    """The ledger counts half of the drafts."""
    return lambda self, drafted, path, reached, **more: add_round(self, drafted // 2, path, reached, **more)


def generous(init: Any) -> Any:
    """An answer may be one token longer than its limit."""

    def faulty(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.most += 1

    return faulty


def lossy(take: Any) -> Any:
    """A delta has three tokens at most."""

    def faulty(self: Any, *more: Any) -> Any:
        taken = take(self, *more)
        return (taken[0][:3], *taken[1:])

    return faulty


def forgetful(preempt: Any) -> Any:
    """A request that loses its slot comes back with another last token."""

    def faulty(self: Any, request: Any) -> None:
        preempt(self, request)
        request.tokens[-1] = (request.tokens[-1] + 1) % 8

    return faulty


def deaf(wish: Any) -> Any:
    """A request's `max_drafted` is not heard."""

    def faulty(self: Any, row: Any, *lengths: int) -> Any:
        row.request.max_drafted = None
        return wish(self, row, *lengths)

    return faulty


def by_batch(accept: Any) -> Any:
    """Noise depends on the row's place in the batch."""

    def faulty(rule: Any, logits: Any, rows: Any, *more: Any, **named: Any) -> Any:
        moved = [replace(row, seed=row.seed + at) for at, row in enumerate(rows)]
        return accept(rule, logits, moved, *more, **named)

    return faulty


def by_draft(accept: Any) -> Any:
    """Noise depends on the number of drafts."""

    def faulty(rule: Any, logits: Any, rows: Any, *more: Any, **named: Any) -> Any:
        moved = [replace(row, seed=row.seed + len(row.tokens)) for row in rows]
        return accept(rule, logits, moved, *more, **named)

    return faulty


def believing(accept: Any) -> Any:
    """The first draft is taken whatever the target says."""

    def faulty(rule: Any, logits: Any, rows: Any, *more: Any, **named: Any) -> Any:
        found = accept(rule, logits, rows, *more, **named)
        return [
            verdict._replace(path=(0,)) if row.tokens and not verdict.path else verdict
            for row, verdict in zip(rows, found, strict=True)
        ]

    return faulty


def once(record: Any) -> Any:
    """What was recorded for a device runs once, and never again."""

    def faulty(self: Any, fn: Any) -> Any:
        record(self, fn)
        return lambda: None

    return faulty


def unmasked(allowed: Any) -> Any:
    """No grammar forbids a token."""
    return lambda rows, vocab: None
