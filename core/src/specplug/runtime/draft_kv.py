"""Draft KV: layers a drafter keeps on the target's page table, and the target's own layers to read.

A row of draft KV is addressed by token index, so preemption, rollback and page reservation are the
target's. Rows below `kv_len` are the drafter's to write in `ingest`; rows at or above it are scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specplug.drafter import KVView
from specplug.models.base import KVGeometry
from specplug.runtime.attention.torch import AttentionRow, RowPlan
from specplug.runtime.kv import KVPool, PagePool
from specplug.spec import KVLayers

Mask = Literal["causal", "full", "ancestors"]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where the rows of the current step stand. Set by the engine before `ingest`."""

    slots: Sequence[int]
    begin: Sequence[int]
    """Token index of each row's first token."""
    q_len: Sequence[int]
    kv_len: Sequence[int]
    """Committed tokens after the step = token index of the root."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A declared way to read: made by `KVView.pattern`, passed to `attend`."""

    name: str
    q_len: int | None
    mask: Mask
    window: int | None
    offset: int


class Patterns:
    """What every `KVView` knows of the ways to read that it was told."""

    def __init__(self) -> None:
        self._patterns: dict[str, Pattern] = {}

    def pattern(
        self,
        name: str,
        q_len: int | None,
        mask: Mask = "causal",
        window: int | None = None,
        offset: int = 0,
    ) -> Pattern:
        """See `specplug.KVView`."""
        if name in self._patterns:
            raise ValueError(f"pattern {name!r} is declared twice")
        if q_len is None and (mask != "causal" or offset > 0):
            raise ValueError(f"pattern {name!r}: the step's own rows are causal, at their own indices or earlier")
        if mask == "ancestors" and offset:
            raise ValueError(f"pattern {name!r}: offset {offset} means nothing where `visible` says what is seen")
        self._patterns[name] = Pattern(name, q_len, mask, window, offset)
        return self._patterns[name]

    def _check(self, pattern: Pattern, visible: Tensor | None) -> None:
        """Raise ValueError for a pattern that is not this view's, or that `visible` does not belong to."""
        if (pattern.mask == "ancestors") != (visible is not None):
            raise ValueError(f"pattern {pattern.name!r} with mask {pattern.mask!r}: `visible` belongs to 'ancestors'")
        if self._patterns.get(pattern.name) is not pattern:
            raise ValueError(f"pattern {pattern.name!r} was not declared by this view's `pattern`")


class PagedView(Patterns):
    """The `KVView` over one pool. Patterns are planned once a step, when first used."""

    def __init__(self, pool: KVPool, pages: PagePool, *, writable: bool) -> None:
        super().__init__()
        self._pool = pool
        self._pages = pages
        self._writable = writable
        self._plans: dict[str, RowPlan] = {}
        self._step: StepRows | None = None

    def begin(self, step: StepRows) -> None:
        """Take over the rows of a new step. Called by the engine before `ingest`."""
        self._step = step
        self._plans.clear()

    def write(self, layer: int, k: Tensor, v: Tensor, index: Tensor | None = None) -> None:
        """See `specplug.KVView`."""
        if not self._writable:
            raise RuntimeError("the target's KV is read-only")
        rows = self._own_rows() if index is None else self._rows_at(index)
        if len(rows) != len(k):
            raise ValueError(f"{len(k)} rows of K for {len(rows)} token indices")
        self._pool.k[layer].index_copy_(0, rows, k)
        self._pool.v[layer].index_copy_(0, rows, v)

    def attend(
        self, pattern: Pattern, layer: int, q: Tensor, visible: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """See `specplug.KVView`."""
        self._check(pattern, visible)
        geometry = self._pool.layers[layer]
        window = pattern.window if pattern.window is not None else geometry.window
        if visible is not None:  # says something new at every call
            plan = RowPlan(self._rows_of(pattern, visible), self._pages)
        else:
            if pattern.name not in self._plans:
                self._plans[pattern.name] = RowPlan(self._rows_of(pattern, None), self._pages)
            plan = self._plans[pattern.name]
        shape = KVGeometry(geometry.kv_heads, geometry.k_dim, geometry.v_dim, window)
        return plan.attend(self._pool.k[layer], self._pool.v[layer], shape, q, scale)

    def _rows_of(self, pattern: Pattern, visible: Tensor | None) -> list[AttentionRow]:
        step = self._current()
        if visible is not None:
            # A query's position follows from the length of its path, itself included.
            paths = (visible.sum(-1) - 1).clamp_min(0).tolist()
            return [
                AttentionRow(slot, kv_len, visible.shape[1], beyond=seen, placed=path, scattered=True)
                for slot, kv_len, seen, path in zip(step.slots, step.kv_len, visible, paths, strict=True)
            ]
        firsts = step.begin if pattern.q_len is None else step.kv_len
        widths = step.q_len if pattern.q_len is None else [pattern.q_len] * len(step.slots)
        return [
            _row(slot, first + pattern.offset, width, pattern.mask == "full")
            for slot, first, width in zip(step.slots, firsts, widths, strict=True)
        ]

    def _own_rows(self) -> Tensor:
        step = self._current()
        found = [
            self._pages.rows(slot, begin, begin + q_len)
            for slot, begin, q_len in zip(step.slots, step.begin, step.q_len, strict=True)
        ]
        return torch.from_numpy(np.concatenate(found))

    def _rows_at(self, index: Tensor) -> Tensor:
        step = self._current()
        wanted = index.numpy()
        slots = np.asarray(step.slots)
        slots = np.repeat(slots, step.q_len) if wanted.ndim == 1 else slots[:, None]
        if wanted.ndim > 2 or len(wanted) != len(slots):
            raise ValueError(
                f"index {list(wanted.shape)}: expected [{len(step.slots)}, q_len] or [{sum(step.q_len)}], "
                "one row of token indices per row of the step, or one index per token"
            )
        page_size = self._pages.page_size
        columns = self._pages.table.shape[1]
        page = wanted // page_size
        rows = self._pages.table[slots, np.clip(page, 0, columns - 1)] * page_size + wanted % page_size
        rows = np.where((wanted < 0) | (page >= columns), self._pages.trash_row, rows)
        return torch.from_numpy(rows.reshape(-1))

    def _current(self) -> StepRows:
        assert self._step is not None, "draft KV is used inside `ingest` and `propose` only"
        return self._step


class PartView:
    """The layers `first` to ``first + count`` of a view, numbered from 0: the KV of a drafter inside another."""

    def __init__(self, view: KVView, prefix: str, first: int, count: int) -> None:
        """`prefix` keeps its patterns apart from those of the others."""
        self._view = view
        self._prefix = prefix
        self._first = first
        self._count = count

    def pattern(
        self, name: str, q_len: int | None, mask: Mask = "causal", window: int | None = None, offset: int = 0
    ) -> Any:
        """See `specplug.KVView`."""
        return self._view.pattern(self._prefix + name, q_len, mask, window, offset)

    def write(self, layer: int, k: Tensor, v: Tensor, index: Tensor | None = None) -> None:
        """See `specplug.KVView`."""
        self._view.write(self._own(layer), k, v, index)

    def attend(
        self, pattern: Any, layer: int, q: Tensor, visible: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """See `specplug.KVView`."""
        return self._view.attend(pattern, self._own(layer), q, visible, scale)

    def _own(self, layer: int) -> int:
        if not 0 <= layer < self._count:
            raise IndexError(f"KV layer {layer}: its plan declares {self._count}")
        return self._first + layer


def _row(slot: int, first: int, q_len: int, full: bool) -> AttentionRow:
    """Return `q_len` queries at the token indices from `first` on, which may be negative.

    A query before the beginning sees token 0, so that its result, which means nothing, is a number.
    """
    if first >= 0:
        return AttentionRow(slot, first, q_len, beyond=torch.ones(q_len, q_len, dtype=torch.bool) if full else None)
    seen = torch.ones(q_len, max(first + q_len, 1), dtype=torch.bool)
    if not full:
        seen = seen.tril(first)
        seen[:, 0] = True
    return AttentionRow(slot, 0, q_len, beyond=seen, placed=range(first, first + q_len))


def geometries(layers: Sequence[KVLayers]) -> list[KVGeometry]:
    """Return one geometry per layer of a plan's `kv`."""
    return [
        KVGeometry(group.kv_heads, group.k_dim, group.v_dim, group.window)
        for group in layers
        for _ in range(group.layers)
    ]


def scratch_rows(layers: Sequence[KVLayers]) -> int:
    """Return the most temporary rows one round of a plan writes above `kv_len`."""
    return max((group.scratch_rows for group in layers), default=0)
