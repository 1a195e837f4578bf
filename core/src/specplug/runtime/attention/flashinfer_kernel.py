"""One kernel of FlashInfer's and the arrays it is planned with.

FlashInfer cuts keys into chunks on the host (`plan`) and runs any number of layers with that (`run`). A
captured graph holds on to the addresses and to the grid; what a plan decides reaches it through buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specplug.models.base import KVGeometry
from specplug.runtime.device.stream import Mark, host_buffer

_HEAD_DIMS = (64, 128, 256, 512)  # what FlashInfer's kernels are compiled for
_BLOCKS_PER_PROCESSOR = 2  # as its scheduler counts
_GRAIN = 1 << 16
_MOST_WORKSPACE = 1 << 30
# The arrays of `Lengths`, and how many entries each has beyond the rows.
_EXTRA = {"q_indptr": 1, "kv_indptr": 1, "mask_indptr": 1, "last_page": 0, "kv_len": 0}


def unsupported(geometry: KVGeometry, dtype: torch.dtype) -> str:
    """Return why FlashInfer cannot serve a layer; empty if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels take float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not geometry.q_heads:
        return "the number of query heads is not known before the first query"
    if geometry.q_heads % geometry.kv_heads:
        return f"{geometry.q_heads} query heads are no multiple of {geometry.kv_heads} KV heads"
    if geometry.k_dim != geometry.v_dim:
        return f"head dims of K ({geometry.k_dim}) and V ({geometry.v_dim}) differ"
    if geometry.k_dim not in _HEAD_DIMS:
        return f"head dim {geometry.k_dim} is none of {', '.join(map(str, _HEAD_DIMS))}"
    return ""


class Lengths:
    """The index arrays of up to `capacity` rows, int32: written on the host, copied to the device at once.

    ``q_indptr``, ``kv_indptr`` (in pages) and ``mask_indptr`` (in bytes) have an entry more than there are rows;
    ``last_page`` (tokens in a row's last page) and ``kv_len`` (its keys) have one per row.
    """

    def __init__(
        self, capacity: int, page_size: int, device: torch.device, empty: int = 0, *, masked: bool = False
    ) -> None:
        """`empty`: rows without queries that are put behind those that are set (`KernelShape.empty_rows`); `masked`:
        somebody reads ``mask_indptr``. Else it is not written, since the device may wait for `set`."""
        self._empty = np.zeros(empty, dtype=np.int64)
        sizes = [capacity + empty + extra for extra in _EXTRA.values()]
        self._whole = host_buffer((sum(sizes),), device, torch.int32)
        self._copy = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host: dict[str, Tensor] = dict(zip(_EXTRA, torch.split(self._whole, sizes), strict=True))
        self._device: dict[str, Tensor] = dict(zip(_EXTRA, torch.split(self._copy, sizes), strict=True))
        self._page_size = page_size
        self._masked = masked
        self._taken = Mark(device)
        self._arrays: dict[str, np.ndarray] = {}  # the host's side, as long as the rows set last
        self._tensors: dict[str, Tensor] = {}  # the same, for FlashInfer
        self.rows = -1
        """Rows of the last `set`, the empty ones included."""
        self.total = 0
        """Their queries."""
        self.pages = 0
        """Pages of all rows."""
        self._q_len = self._empty

    def set(self, q_len: np.ndarray, kv_len: np.ndarray) -> None:
        """Write the arrays of rows with `q_len` queries over `kv_len` keys each, int64 [R].

        Waits until the copies of what they held before are made: those launched up to `taken`.
        """
        self._taken.wait()
        if len(self._empty):
            q_len, kv_len = np.concatenate((q_len, self._empty)), np.concatenate((kv_len, self._empty))
        if len(q_len) != self.rows:
            self.rows = len(q_len)
            self._tensors = {name: part[: self.rows + _EXTRA[name]] for name, part in self._host.items()}
            self._arrays = {name: part.numpy() for name, part in self._tensors.items()}
        arrays = self._arrays
        pages = -(-kv_len // self._page_size)
        q_len.cumsum(out=arrays["q_indptr"][1:])
        pages.cumsum(out=arrays["kv_indptr"][1:])
        if self._masked:
            (-(-(q_len * kv_len) // 8)).cumsum(out=arrays["mask_indptr"][1:])
        arrays["last_page"][:] = kv_len - (pages - (pages > 0)) * self._page_size
        arrays["kv_len"][:] = kv_len
        self.total, self.pages = int(arrays["q_indptr"][-1]), int(arrays["kv_indptr"][-1])
        self._q_len = q_len

    @property
    def widest(self) -> int:
        """The most queries of a row."""
        return int(self._q_len.max(initial=0))

    def upload(self) -> None:
        """Copy them to the device, in the order of the stream."""
        self._copy.copy_(self._whole, non_blocking=True)

    def taken(self) -> None:
        """Say that all copies of them are launched, FlashInfer's of what it made of them included."""
        self._taken.record()

    def host(self, name: str) -> Tensor:
        """Return the host's side of an array, as long as the rows set last."""
        return self._tensors[name]

    def device(self, name: str) -> Tensor:
        """Return the device's side."""
        return self._device[name][: self.rows + _EXTRA[name]]


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel is compiled and planned for."""

    q_heads: int
    kv_heads: int
    dim: int
    window: int | None
    dtype: torch.dtype
    page_size: int
    causal: bool
    masked: bool
    """What is seen is read from packed bits."""

    def workspace_bytes(self, rows: int, total: int | None, processors: int) -> int:
        """Return the float workspace a plan takes at most; `total`: queries of a static bucket, None: an eager step.

        Follows FlashInfer's scheduler: partial results of every tile of queries, as many as blocks run at once.
        """
        group = self.q_heads // self.kv_heads
        tile = 64 if self.dim >= 256 else 128
        blocks = _BLOCKS_PER_PROCESSOR * processors // self.kv_heads
        if total is not None:
            longest = (total - rows + 1) * group if total >= rows else tile
            tile = 16 if longest <= 16 else 64 if longest <= 64 else tile
            blocks = max(blocks, -(-total * group // tile) + rows - 1)
        return self.q_heads * blocks * tile * (self.dim + 1) * 4 + 64

    def empty_rows(self, rows: int, total: int, processors: int) -> int:
        """Return how many empty rows make FlashInfer choose the tile of queries that fits rows of equal length.

        For a graph its scheduler assumes that one row may have all queries that the others leave, and takes
        the tile for that: at 64 rows of 8 a tile of 128 where 32 would do. Each empty row takes a query
        from that row. They cost blocks that end at once, and workspace, which bounds their number.
        """
        group = self.q_heads // self.kv_heads
        each = -(-total // rows) * group
        tile = 16 if each <= 16 else 64
        if each > 64 or (total - rows + 1) * group <= tile:
            return 0
        empty = total + 1 - tile // group - rows
        fits = self.workspace_bytes(rows + empty, total, processors) <= _MOST_WORKSPACE
        return max(empty, 0) if fits and group <= tile else 0

    def index_bytes(self, rows: int, total: int, processors: int) -> int:
        """Return the integer workspace that a plan of `rows` rows and `total` queries takes at most."""
        group = self.q_heads // self.kv_heads
        blocks = max(_BLOCKS_PER_PROCESSOR * processors, -(-total * group // 16) + rows)
        need = 13 * blocks + 4 * (rows + total + 2) + 256
        return -(-need // _GRAIN) * _GRAIN


class Kernel:
    """FlashInfer's wrapper for one shape: planned for a step, run for each of its layers."""

    def __init__(
        self,
        shape: KernelShape,
        workspace: Tensor,
        indices: Tensor,
        bits: Tensor | None,
        lengths: Lengths,
        index_bytes: int,
        *,
        static: bool,
    ) -> None:
        """`workspace`: float workspace, shared by kernels that do not run at once; `indices`: int32, each row's pages,
        filled by the caller before `run`; `bits`: the packed masks, likewise; `static`: for captured graphs of the
        rows and queries that `lengths` holds now. Else for eager steps, in which any number may follow another.
        """
        self.bits = bits
        """Eager kernels: may be replaced by a larger one before `plan`."""
        self._shape = shape
        self._indices = indices
        self._lengths = lengths
        self._static = static
        self.total = 0
        """Queries of the planned step, pads of a static one included; `run` takes as many."""
        buffers = {}
        if static:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": lengths.device("q_indptr"),
                "paged_kv_indptr_buf": lengths.device("kv_indptr"),
                "paged_kv_indices_buf": indices,
                "paged_kv_last_page_len_buf": lengths.device("last_page"),
                "custom_mask_buf": bits,
                "mask_indptr_buf": lengths.device("mask_indptr") if bits is not None else None,
            }
        self._wrapper: Any = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa2", **buffers
        )
        # It takes 8 MB for itself and 8 MB pinned, which dozens of buckets cannot each have.
        small = torch.empty(index_bytes, dtype=torch.uint8, device=workspace.device)
        self._wrapper.reset_workspace_buffer(workspace, small)
        if static:
            # The first plan fixes the number of queries for the kernel's life.
            self._full_plan()

    def plan(self) -> None:
        """Plan for what `lengths` holds, uploaded or about to be in the same stream; `Lengths.taken` has to follow,
        since FlashInfer's own pinned buffer must not be written again before it is copied."""
        assert self._lengths.pages <= len(self._indices), "rows hold more pages than the pool has"
        if self._static:
            self._plan_again()
        else:
            self._full_plan()
            if self.bits is not None:
                # Without a graph `plan` only takes masks that exist already. `run` reads these two.
                self._wrapper._custom_mask_buf = self.bits
                self._wrapper._mask_indptr_buf = self._lengths.device("mask_indptr")

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None, scale: float | None
    ) -> None:
        """Attend with `q` [total, q_heads, dim] over a layer's pool [rows, kv_heads, dim]; fills `out` and `lse`.

        `lse` float32 [total, q_heads] is to the base 2. What belongs to no row is left as it was.
        """
        if not self.total:
            return
        shape = self._shape
        paged = tuple(part.view(-1, shape.page_size, shape.kv_heads, shape.dim) for part in (keys, values))
        # Its scale is 1 / sqrt(dim) times that of the queries.
        factor = None if scale is None else scale * shape.dim**0.5
        self._wrapper.run(
            q[: self.total],
            paged,
            q_scale=factor,
            out=out[: self.total],
            lse=None if lse is None else lse[: self.total],
            return_lse=lse is not None,
        )

    def _full_plan(self) -> None:
        shape, lengths = self._shape, self._lengths
        self.total = lengths.total
        self._wrapper.plan(
            lengths.host("q_indptr"),
            lengths.host("kv_indptr"),
            # The device fills the list of pages: here it has no entries, or is the buffer itself.
            self._indices[:0] if self._static else self._indices,
            lengths.host("last_page"),
            shape.q_heads,
            shape.kv_heads,
            shape.dim,
            shape.page_size,
            causal=shape.causal,
            window_left=self._window_left,
            q_data_type=shape.dtype,
            seq_lens=lengths.host("kv_len"),
            max_token_per_sequence=lengths.widest,
        )

    def _plan_again(self) -> None:
        """The scheduler's part of `plan` alone: the rest costs a third of a millisecond at 64 rows.

        The arguments are those of `BatchPrefillWithPagedKVCacheWrapper.plan` in the FlashInfer versions that the
        extra ``cuda`` allows. Under a graph only the contents of buffers change, never the answer.
        """
        shape, lengths, wrapper = self._shape, self._lengths, self._wrapper
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            lengths.host("q_indptr"),
            lengths.host("kv_indptr"),
            lengths.host("kv_len"),
            self.total,
            lengths.rows,
            shape.q_heads,
            shape.kv_heads,
            shape.page_size,
            True,  # for a graph
            shape.dim,
            shape.dim,
            shape.causal,
            self._window_left,
            -1,  # no fixed split size
            False,  # splitting allowed
            0,  # no blocks of another kernel beside it
        )

    @property
    def _window_left(self) -> int:
        """FlashInfer counts the keys before the query's own; -1: all."""
        return -1 if self._shape.window is None else self._shape.window - 1
