"""Attention by FlashInfer on CUDA, for layers that it serves; the others go through `paged` in the same step.

A step is of one of four kinds. *causal*: no row needs a tree mask. *tree*: all rows go through the mask.
*both*: tree rows through the mask, the others causal, in plans of their own, since a mask makes a long
prompt chunk dear. *split*: as both, but the contexts of the tree rows are so long that reading a mask for
every key costs more than a second kernel: what lies below each row's first token is attended without a
mask, and the few keys of the row itself by `paged`, which goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specplug.models.base import KVGeometry
from specplug.runtime.attention.backend import HostRows, PlannedAttention
from specplug.runtime.attention.flashinfer_kernel import Kernel, KernelShape, Lengths, unsupported
from specplug.runtime.attention.masks import list_pages, pack_masks
from specplug.runtime.attention.paged import paged_attend, paged_write, step_queries
from specplug.runtime.device.rows import StepRows
from specplug.runtime.kv import KVPool

SPLIT_ABOVE = 3072
"""Keys of a tree row, on average, above which the split is faster than the mask (H200: 1k and 8k on either side)."""

_WORKSPACE = 256 << 20
_EAGER_INDEX_BYTES = 8 << 20
# Plans of each kind in the order in which they run: a causal plan comes last, for it writes chain rows only.
_ROLES = {"causal": ("causal",), "tree": ("masked",), "both": ("masked", "causal"), "split": ("below", "causal")}

__all__ = ["SPLIT_ABOVE", "FlashInferBackend", "unsupported"]


@dataclass(slots=True)
class _Plan:
    """One role in a step: its lengths, and a kernel for each geometry that it serves."""

    role: str
    lengths: Lengths
    kernels: dict[KVGeometry, Kernel]

    def plan(self, host: HostRows) -> None:
        """Plan `host`'s rows: all of them, so that results land where their queries are; those of no concern to
        the role have no keys, or, behind the others, no queries."""
        q_len, keys = host.q_len, host.begin + host.q_len
        if self.role == "causal":
            chain = ~host.tree
            self.lengths.set(q_len * chain, keys * chain)
        elif self.role == "masked":
            self.lengths.set(q_len, keys * host.tree)
        else:
            self.lengths.set(q_len, host.begin * host.tree)
        self.lengths.upload()
        for kernel in self.kernels.values():
            kernel.plan()
        self.lengths.taken()


class FlashInferBackend:
    """See `specplug.runtime.attention.backend.Backend`."""

    def __init__(
        self,
        pool: KVPool,
        layers: Sequence[KVGeometry],
        dtype: torch.dtype,
        page_size: int,
        slots: int,
        columns: int,
        device: torch.device,
    ) -> None:
        """`layers`: the pool's, with `q_heads`; `slots`: most rows of a step, pads included; `columns`: most pages of
        a request."""
        self.pool = pool
        self.layers = tuple(layers)
        self.unserved = {at: why for at, layer in enumerate(layers) if (why := unsupported(layer, dtype))}
        """Why FlashInfer does not serve a layer, by its number."""
        self._dtype = dtype
        self._page_size = page_size
        self._slots = slots
        self._capacity = columns * page_size
        self._device = device
        cuda = device.type == "cuda"  # else a test with a stand-in for FlashInfer
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        # Filled anew in every forward, so that all graphs share them. A page belongs to one slot, so the lists of
        # all rows together are no longer than the pool; a row of pads may name the trash page once.
        pages = pool.k[0].shape[0] // page_size + slots if pool.k else slots
        self._indices = {causal: torch.zeros(pages, dtype=torch.int32, device=device) for causal in (True, False)}
        self._bits = torch.zeros(0, dtype=torch.uint8, device=device)
        eager = [self._shape(layer, "causal").workspace_bytes(slots, None, self._processors) for layer in self._served]
        self._workspace = torch.empty(max([_WORKSPACE, *eager]), dtype=torch.uint8, device=device)
        self._scratch: dict[tuple[int, ...], Tensor] = {}
        self._eager: dict[str, _Plan] = {}

    def kinds(self, trees: bool) -> tuple[str, ...]:
        """See `Backend`."""
        if not trees:
            return ("causal",)
        return ("causal", "tree", "both", *(("split",) if self._capacity > SPLIT_ABOVE else ()))

    def kind(self, host: HostRows) -> str:
        """See `Backend`."""
        tree = host.tree & (host.q_len > 0)
        if not tree.any():
            return "causal"
        widths = host.q_len[tree]
        # Also what keeps the packed masks within their buffer.
        if int((widths * (host.begin[tree] + widths)).sum()) > SPLIT_ABOVE * int(widths.sum()):
            return "split"
        return "both" if bool((~tree & (host.q_len > 0)).any()) else "tree"

    def prepare(self, rows: StepRows, kind: str, *, static: bool) -> PlannedAttention:
        """See `Backend`."""
        masked = "masked" in _ROLES[kind]
        if masked:
            self._bits = _at_least(self._bits, rows.total * min(SPLIT_ABOVE, self._capacity) // 8 + rows.rows)
        plans = [self._plan(role, rows) if static else self._eager_plan(role) for role in _ROLES[kind]]
        out = {layer: self._buffer(rows.total, layer.q_heads, layer.v_dim, dtype=self._dtype) for layer in self._served}
        lse = {layer: self._buffer(rows.total, layer.q_heads, dtype=torch.float32) for layer in self._served}
        return _Step(self, rows, plans, out, lse, self._bits if masked else None)

    @property
    def _served(self) -> set[KVGeometry]:
        return {layer for at, layer in enumerate(self.layers) if at not in self.unserved}

    def indices(self, role: str) -> Tensor:
        """The list of pages that the kernels of `role` read."""
        return self._indices[role == "causal"]

    def _shape(self, layer: KVGeometry, role: str) -> KernelShape:
        return KernelShape(
            layer.q_heads,
            layer.kv_heads,
            layer.k_dim,
            layer.window,
            self._dtype,
            self._page_size,
            role == "causal",
            role == "masked",
        )

    def _plan(self, role: str, rows: StepRows) -> _Plan:
        shapes = {layer: self._shape(layer, role) for layer in self._served if _serves(role, layer)}
        empty = max((shape.empty_rows(rows.rows, rows.total, self._processors) for shape in shapes.values()), default=0)
        count = rows.rows + empty
        need = [shape.workspace_bytes(count, rows.total, self._processors) for shape in shapes.values()]
        self._workspace = _at_least(self._workspace, max(need, default=0))
        lengths = Lengths(rows.rows, self._page_size, self._device, empty, masked=role == "masked")
        whole = np.zeros(rows.rows, dtype=np.int64)
        whole[0] = rows.total
        lengths.set(whole, whole)
        bits = self._bits if role == "masked" else None
        kernels = {
            layer: Kernel(
                shape,
                self._workspace,
                self.indices(role),
                bits,
                lengths,
                shape.index_bytes(count, rows.total, self._processors),
                static=True,
            )
            for layer, shape in shapes.items()
        }
        lengths.taken()
        return _Plan(role, lengths, kernels)

    def _eager_plan(self, role: str) -> _Plan:
        if role not in self._eager:
            lengths = Lengths(self._slots, self._page_size, self._device, masked=role == "masked")
            kernels = {
                layer: Kernel(
                    self._shape(layer, role),
                    self._workspace,
                    self.indices(role),
                    None,
                    lengths,
                    _EAGER_INDEX_BYTES,
                    static=False,
                )
                for layer in self._served
                if _serves(role, layer)
            }
            self._eager[role] = _Plan(role, lengths, kernels)
        if role == "masked":
            for kernel in self._eager[role].kernels.values():
                kernel.bits = self._bits
        return self._eager[role]

    def _buffer(self, total: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return zeros, later anything finite, [total, *shape], which all steps and layers of that shape share."""
        held = self._scratch.get((dtype.itemsize, *shape))
        if held is None or len(held) < total:
            held = torch.zeros(total, *shape, dtype=dtype, device=self._device)
            self._scratch[dtype.itemsize, *shape] = held
        return held[:total]


class _Step:
    """The `PlannedAttention` of `FlashInferBackend`."""

    def __init__(
        self,
        backend: FlashInferBackend,
        rows: StepRows,
        plans: Sequence[_Plan],
        out: dict[KVGeometry, Tensor],
        lse: dict[KVGeometry, Tensor],
        bits: Tensor | None,
    ) -> None:
        self._backend = backend
        self._rows = rows
        self._plans = plans
        self._out = out
        self._lse = lse
        self._bits = bits
        self._queries = step_queries(rows, trees=any(plan.role != "causal" for plan in plans))

    def plan(self, host: HostRows) -> None:
        """See `PlannedAttention`."""
        late = host.tree[:-1] & ~host.tree[1:] & (host.q_len[1:] > 0)
        assert len(self._plans) == 1 or not late.any(), "rows without a tree stand before those with one"
        for plan in self._plans:
            plan.plan(host)

    def begin(self) -> None:
        """See `PlannedAttention`."""
        for plan in self._plans:
            if not plan.kernels:
                continue
            list_pages(self._backend.indices(plan.role), plan.lengths.device("kv_indptr"), self._rows)
            if plan.role == "masked":
                assert self._bits is not None
                indptr, kv_len = plan.lengths.device("mask_indptr"), plan.lengths.device("kv_len")
                pack_masks(self._bits, indptr, kv_len, self._rows)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float | None = None) -> Tensor:
        """See `specplug.models.base.AttentionStep`. The result is valid until the next call."""
        keys, values = self._backend.pool.k[layer], self._backend.pool.v[layer]
        if k is not None and v is not None:
            paged_write(keys, values, k, v, self._rows.kv_rows)
        geometry = self._backend.layers[layer]
        if layer in self._backend.unserved or not all(_serves(plan.role, geometry) for plan in self._plans):
            return paged_attend(q, keys, values, self._queries, window=geometry.window, scale=scale)
        out, lse = self._out[geometry], self._lse[geometry]
        for plan in self._plans:
            below = plan.role == "below"
            plan.kernels[geometry].run(q, keys, values, out, lse if below else None, scale)
            if below:
                paged_attend(q, keys, values, self._queries, scale=scale, out=out, below_lse=lse)
        return out


def _serves(role: str, layer: KVGeometry) -> bool:
    """FlashInfer's windows count token indices, which inside a tree are no positions."""
    return role == "causal" or layer.window is None


def _at_least(held: Tensor, size: int) -> Tensor:
    """Return `held`, or a larger buffer; graphs that were captured with the smaller one keep it alive."""
    return held if len(held) >= size else torch.zeros(size, dtype=held.dtype, device=held.device)
