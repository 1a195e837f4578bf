"""How a device executor asks for attention: a backend prepares a step of some shape once and plans it each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from specplug.models.base import AttentionStep
from specplug.runtime.attention.paged import paged_attend, paged_write, step_queries
from specplug.runtime.device.rows import StepRows
from specplug.runtime.kv import KVPool


@dataclass(slots=True)
class HostRows:
    """What the host knows about a step's rows, as long as the bucket; pads are zeros. Set by the executor.

    Rows whose drafts may branch stand behind all others; only pads follow them.
    """

    begin: np.ndarray
    """int64 [R]: token index of each row's first token, exact: a plan made with another one may be silently wrong."""
    q_len: np.ndarray
    """int64 [R]: tokens of each row; 0: a pad."""
    tree: np.ndarray
    """bool [R]: the row's drafts may branch, so that it needs the tree mask."""


class PlannedAttention(AttentionStep, Protocol):
    """Attention of the steps of one shape and mask kind. Made by `Backend.prepare`."""

    def plan(self, host: HostRows) -> None:
        """Take over a step's lengths. Called before each replay or eager forward; launches copies, waits for nothing
        that was launched after its own last call."""

    def begin(self) -> None:
        """Make what the kernels read about the rows. Called on the device's stream once a forward, after the
        prologue and before the first `attend`; inside the captured region where there is one."""


class Backend(Protocol):
    """Attention over the target's KV."""

    def kinds(self, trees: bool) -> tuple[str, ...]:
        """Return the mask kinds a step may need, the commonest first; `trees`: drafts may branch."""

    def kind(self, host: HostRows) -> str:
        """Return which of them a step needs."""

    def prepare(self, rows: StepRows, kind: str, *, static: bool) -> PlannedAttention:
        """Return attention for steps over `rows`.

        `static`: for a captured graph, called once per bucket and kind before the capture, while nothing else is
        being captured; the result must live as long as the graph. Else for the next eager step alone.
        """


class PagedBackend:
    """Attention by the kernels of `paged`, which read everything from the device: any dtype, any head dim."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def kinds(self, trees: bool) -> tuple[str, ...]:
        """See `Backend`."""
        return ("causal", "tree") if trees else ("causal",)

    def kind(self, host: HostRows) -> str:
        """See `Backend`."""
        return "tree" if bool((host.tree & (host.q_len > 0)).any()) else "causal"

    def prepare(self, rows: StepRows, kind: str, *, static: bool) -> PlannedAttention:
        """See `Backend`."""
        return _PagedStep(self._pool, rows, kind == "tree")


class _PagedStep:
    """The `PlannedAttention` of `PagedBackend`: nothing to plan, nothing to make."""

    def __init__(self, pool: KVPool, rows: StepRows, trees: bool) -> None:
        self._pool = pool
        self._kv_rows = rows.kv_rows
        self._queries = step_queries(rows, trees=trees)

    def plan(self, host: HostRows) -> None:
        """See `PlannedAttention`."""

    def begin(self) -> None:
        """See `PlannedAttention`."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.models.base.AttentionStep`."""
        keys, values = self._pool.k[layer], self._pool.v[layer]
        if k is not None and v is not None:
            paged_write(keys, values, k, v, self._kv_rows)
        return paged_attend(q, keys, values, self._queries, window=self._pool.layers[layer].window, scale=scale)
