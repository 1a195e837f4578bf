"""A drafter's view of paged KV on the device: token indices become pool rows there, and nothing waits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specplug.runtime.attention.paged import PagedQueries, Sees, paged_attend, paged_write, paged_write_at
from specplug.runtime.device.rows import StepRows
from specplug.runtime.draft_kv import Pattern, Patterns
from specplug.runtime.kv import KVPool


class DeviceView(Patterns):
    """The `KVView` of one pool whose rows, lengths and page tables are on the device.

    `begin` binds it to the tensors of a step. In a captured graph it runs at the capture alone: replays read
    whatever the same tensors hold by then. Pad rows read and write the scratch slot's pages.
    """

    def __init__(self, pool: KVPool, trash_row: int, *, writable: bool) -> None:
        """`trash_row`: the pool row in which writes to nowhere end."""
        super().__init__()
        self._pool = pool
        self._trash_row = trash_row
        self._writable = writable
        self._rows: StepRows | None = None
        self._kv_len: Tensor | None = None

    def begin(self, rows: StepRows, kv_len: Tensor) -> None:
        """Take over the rows of a step. `kv_len` int64 [R]: committed tokens after it = token index of each root."""
        self._rows, self._kv_len = rows, kv_len

    def write(self, layer: int, k: Tensor, v: Tensor, index: Tensor | None = None) -> None:
        """See `specplug.KVView`."""
        if not self._writable:
            raise RuntimeError("the target's KV is read-only")
        rows, _ = self._current()
        keys, values = self._pool.k[layer], self._pool.v[layer]
        count = rows.total if index is None else index.numel()
        if index is not None and (index.ndim > 2 or len(index) != (rows.total if index.ndim == 1 else rows.rows)):
            raise ValueError(
                f"index {list(index.shape)}: expected [{rows.rows}, q_len] or [{rows.total}], "
                "one row of token indices per row of the step, or one index per token"
            )
        if count != len(k):
            raise ValueError(f"{len(k)} rows of K for {count} token indices")
        if index is None:
            paged_write(keys, values, k, v, rows.kv_rows)
        else:
            paged_write_at(keys, values, k, v, index, rows, self._trash_row)

    def attend(
        self, pattern: Pattern, layer: int, q: Tensor, visible: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """See `specplug.KVView`."""
        self._check(pattern, visible)
        rows, kv_len = self._current()
        window = pattern.window if pattern.window is not None else self._pool.layers[layer].window
        wanted = rows.total if pattern.q_len is None else rows.rows * pattern.q_len
        if len(q) != wanted:
            raise ValueError(f"pattern {pattern.name!r}: {len(q)} queries where the step has {wanted}")
        beyond: dict[str, Any] = {}
        sees: Sees = "full" if pattern.mask == "full" else "causal"
        if visible is not None:
            sees = "visible"
            beyond["visible"] = visible
            if window is not None:
                # A query's position follows from the length of its path, itself included.
                path = (visible.sum(-1) - 1).clamp_min(0)
                beyond["positions"] = (kv_len[:, None] + path).flatten()
        queries = PagedQueries(
            rows.tables,
            rows.page_size,
            rows.slots,
            rows.begin if pattern.q_len is None else kv_len,
            offset=pattern.offset,
            row_start=rows.row_start if pattern.q_len is None else None,
            q_len=pattern.q_len or 0,
            sees=sees,
            **beyond,
        )
        return paged_attend(q, self._pool.k[layer], self._pool.v[layer], queries, window=window, scale=scale)

    def _current(self) -> tuple[StepRows, Tensor]:
        assert self._rows is not None, "draft KV is used inside `ingest` and `propose` only"
        assert self._kv_len is not None
        return self._rows, self._kv_len
