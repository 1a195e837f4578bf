"""Attention on the device, in plain torch, against `TorchAttention`; FlashInfer's plans with a stand-in for it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from specplug import tree
from specplug.models.base import KVGeometry
from specplug.runtime.attention import flashinfer as planned
from specplug.runtime.attention.backend import HostRows, PagedBackend
from specplug.runtime.attention.flashinfer import FlashInferBackend, unsupported
from specplug.runtime.attention.flashinfer_kernel import KernelShape
from specplug.runtime.attention.masks import list_pages, pack_masks
from specplug.runtime.attention.paged import PagedQueries, paged_attend, paged_write, paged_write_at, step_queries
from specplug.runtime.attention.torch import AttentionRow, TorchAttention
from specplug.runtime.device.rows import StepRows, words_for
from specplug.runtime.kv import KVPool, PagePool

PAGE, LONGEST, SLOTS = 4, 240, 8
CPU = torch.device("cpu")


@dataclass
class Row:
    """One row: tokens before its drafts, and the drafts' parents."""

    begin: int
    literal: int = 1
    parents: Sequence[int] = ()

    @property
    def q_len(self) -> int:
        return self.literal + len(self.parents)


CHAINS = [Row(9), Row(0, 11), Row(30, 1, [-1, 0, 1]), Row(3, 2)]
TREES = [Row(17, 1, [-1, -1, 0, 2, 2, 1]), Row(1, 1, [-1, 0, -1]), Row(40, 1, [-1, -1, -1, 0, 3, 4, 5])]


class Bench:
    """A pool with scattered pages, and the same rows as the host and as the device describe them."""

    def __init__(
        self,
        layers: Sequence[KVGeometry],
        rows: Sequence[Row],
        *,
        pads: int = 2,
        total: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layers, self.dtype = tuple(layers), dtype
        self.generator = torch.Generator().manual_seed(0)
        self.pages = PagePool(SLOTS, 200, PAGE, LONGEST)
        self.pages._free = np.random.default_rng(0).permutation(200).tolist()
        self.pool = KVPool(layers, self.pages.rows_with_trash, dtype, CPU)
        for part in (*self.pool.k, *self.pool.v):
            part.copy_(self.random(*part.shape))
        self.slots = np.random.default_rng(1).permutation(SLOTS)
        self.rows = list(rows)
        for slot, row in zip(self.slots, rows, strict=False):
            assert self.pages.reserve(slot, row.begin + row.q_len + 4)
        own = sum(row.q_len for row in rows)
        self.step = self.describe(rows, len(rows) + pads, own + pads if total is None else total)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def describe(self, rows: Sequence[Row], count: int, total: int) -> StepRows:
        """The rows as the executor and the prologue leave them, padded to `count` rows and `total` tokens."""
        widths = [row.q_len for row in rows] + [0] * (count - len(rows))
        starts = np.cumsum([0, *widths])
        words = words_for(max(8, *(row.q_len for row in rows)))
        slots = [*self.slots[: len(rows)], *[SLOTS] * (count - len(rows))]
        tables = torch.full((SLOTS + 1, self.pages.table.shape[1]), self.pages.pages, dtype=torch.int32)
        tables[:SLOTS] = torch.from_numpy(self.pages.table)
        kv_rows = torch.full((total,), self.pages.trash_row)
        positions = torch.zeros(total, dtype=torch.int64)
        ancestors = torch.zeros(total, words, dtype=torch.int64)
        ancestors[:, 0] = 1
        for slot, row, start in zip(slots, rows, starts, strict=False):
            mine = slice(start, start + row.q_len)
            kv_rows[mine] = torch.from_numpy(self.pages.rows(slot, row.begin, row.begin + row.q_len))
            positions[mine] = row.begin + torch.arange(row.q_len)
            root = row.begin + row.literal - 1
            for node, depth in enumerate(tree.depths(row.parents)):
                positions[start + row.literal + node] = root + depth
            for query, seen in enumerate(tree.ancestor_mask(row.parents) if row.parents else ()):
                for token in torch.nonzero(seen).flatten().tolist():
                    ancestors[start + query, token // 64] |= (1 << token % 64) - (1 << 64 if token % 64 == 63 else 0)
        return StepRows(
            slots=torch.tensor(slots),
            row_start=torch.tensor(starts),
            begin=torch.tensor([row.begin for row in rows] + [0] * (count - len(rows))),
            drafted=torch.tensor([len(row.parents) for row in rows] + [0] * (count - len(rows))),
            token_row=torch.tensor([*np.repeat(np.arange(count), widths), *[SLOTS] * (total - starts[-1])]),
            tokens=torch.zeros(total, dtype=torch.int64),
            positions=positions,
            kv_rows=kv_rows,
            ancestors=ancestors,
            tables=tables,
            page_size=PAGE,
        )

    def host(self, rows: Sequence[Row] | None = None) -> HostRows:
        rows = self.rows if rows is None else rows
        pads = self.step.rows - len(rows)
        return HostRows(
            np.array([row.begin for row in rows] + [0] * pads),
            np.array([row.q_len for row in rows] + [0] * pads),
            np.array([not tree.is_chain(row.parents) for row in rows] + [False] * pads),
        )

    def inputs(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V as views of one fused product."""
        geometry = self.layers[layer]
        sizes = [8 * geometry.k_dim, geometry.kv_heads * geometry.k_dim, geometry.kv_heads * geometry.v_dim]
        q, k, v = self.random(self.step.total, sum(sizes)).split(sizes, dim=1)
        return q.unflatten(1, (8, -1)), *(part.unflatten(1, (geometry.kv_heads, -1)) for part in (k, v))

    def oracle(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """`TorchAttention` of the rows alone, over a copy of the pool."""
        pool = KVPool(self.layers, self.pages.rows_with_trash, self.dtype, CPU)
        for part, other in zip((*pool.k, *pool.v), (*self.pool.k, *self.pool.v), strict=True):
            part.copy_(other)
        rows = [
            AttentionRow(slot, row.begin, row.q_len, None if tree.is_chain(row.parents) else row.parents)
            for slot, row in zip(self.slots, self.rows, strict=False)
        ]
        own = sum(row.q_len for row in self.rows)
        return TorchAttention(rows, self.pages, pool).attend(layer, q[:own], k[:own], v[:own], scale)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("rows", [CHAINS, TREES, [*CHAINS[:3], *TREES], [Row(0)]])
def test_a_step_equals_the_cpus(rows, window):
    """Ragged rows, chains and trees; pads give zeros, and K and V of all layers lie where the CPU's do."""
    layers = (KVGeometry(2, 6, 3, window), KVGeometry(8, 16, 16, window), KVGeometry(1, 5, 8, window))
    bench = Bench(layers, rows)
    backend = PagedBackend(bench.pool)
    host = bench.host()
    attention = backend.prepare(bench.step, backend.kind(host), static=False)
    attention.plan(host)
    attention.begin()
    for layer, scale in ((0, None), (1, 0.3), (2, None)):
        q, k, v = bench.inputs(layer)
        wanted = bench.oracle(layer, q, k, v, scale)
        found = attention.attend(layer, q, k, v, scale)
        torch.testing.assert_close(found[: len(wanted)], wanted, atol=2e-6, rtol=2e-6)
        assert not found[len(wanted) :].any()
        again = attention.attend(layer, q, None, None, scale)  # another layer's KV: read, not written
        assert torch.equal(again, found)


def test_trees_wider_than_a_word():
    parents = np.random.default_rng(3).integers(-1, np.arange(150)).tolist()
    bench = Bench((KVGeometry(2, 6, 6, window=9),), [Row(13, 1, parents), Row(5)])
    q, k, v = bench.inputs(0)
    wanted = bench.oracle(0, q, k, v)
    paged_write(bench.pool.k[0], bench.pool.v[0], k, v, bench.step.kv_rows)
    found = paged_attend(q, bench.pool.k[0], bench.pool.v[0], step_queries(bench.step, trees=True), window=9)
    torch.testing.assert_close(found[: len(wanted)], wanted, atol=2e-6, rtol=2e-6)


def test_kinds_of_the_paged_backend():
    bench = Bench((KVGeometry(1, 4, 4),), [*CHAINS[:2], *TREES[:1]])
    backend = PagedBackend(bench.pool)
    assert backend.kinds(trees=False) == ("causal",)
    assert backend.kinds(trees=True) == ("causal", "tree")
    host = bench.host()
    assert backend.kind(host) == "tree"
    host.q_len[2] = 0  # what a pad says of trees means nothing
    assert backend.kind(host) == "causal"


def test_queries_that_see_nothing_give_zeros_and_unseen_keys_may_hold_anything():
    bench = Bench((KVGeometry(2, 4, 4),), [Row(6), Row(0)], pads=0)
    step, pool = bench.step, bench.pool
    visible = torch.zeros(2, 2, 3, dtype=torch.bool)
    visible[0, 1, 1] = True
    pool.v[0][bench.pages.rows(bench.slots[0], 8, 9)] = torch.nan  # scratch row 2 of row 0
    queries = PagedQueries(step.tables, PAGE, step.slots, step.begin, q_len=2, sees="visible", visible=visible)
    found = paged_attend(bench.random(4, 4, 4), pool.k[0], pool.v[0], queries)
    assert torch.isfinite(found).all()
    assert found[:2].any(dim=(1, 2)).all()
    assert not found[2:].any()  # row 1 has nothing below and is told nothing


@pytest.mark.parametrize("literal", [1, 3])
def test_going_on_from_another_kernel_equals_one_pass(literal):
    """The part below each row's base made elsewhere, with the sums it came from; rows without drafts stay."""
    rows = [Row(9), Row(21, literal, [-1, -1, 0, 2]), Row(0, 1, [-1, 0])]
    bench = Bench((KVGeometry(2, 6, 3),), rows)
    q, k, v = bench.inputs(0)
    keys, values = bench.pool.k[0], bench.pool.v[0]
    paged_write(keys, values, k, v, bench.step.kv_rows)
    queries = step_queries(bench.step, trees=True)
    whole = paged_attend(q, keys, values, queries)
    out, lse = bench.random(len(q), 8, 3), torch.full((len(q), 8), -torch.inf)
    at = 0
    for slot, row in zip(bench.slots, rows, strict=False):
        lower = bench.pages.rows(slot, 0, row.begin)
        for query in range(at, at + row.q_len):
            scores = torch.einsum("hgd,xhd->hgx", q[query].view(2, 4, 6), keys[lower]) * 6**-0.5
            lse[query] = scores.logsumexp(-1).flatten() / np.log(2)
            out[query] = torch.einsum("hgx,xhd->hgd", scores.softmax(-1), values[lower]).flatten(0, 1)
        at += row.q_len
    mark = bench.random(8, 3)
    out[0] = mark
    found = paged_attend(q, keys, values, queries, out=out, below_lse=lse)
    assert found is out
    torch.testing.assert_close(out[1:at], whole[1:at], atol=2e-6, rtol=2e-6)
    assert torch.equal(out[0], mark)


@pytest.mark.parametrize("pads", [0, 1])
def test_writes_by_index(pads):
    """Below 0, beyond a table whose last page is held, and pad tokens, with or without a pad row: nowhere."""
    bench = Bench((KVGeometry(2, 4, 3),), [Row(6, 2), Row(0, 3)], pads=pads, total=6)
    first, second = bench.slots[:2]
    for slot in (first, second):
        assert bench.pages.reserve(slot, LONGEST)
    bench.step.tables[:SLOTS] = torch.from_numpy(bench.pages.table)
    keys, values = bench.pool.k[0], bench.pool.v[0]
    before = keys.clone()
    index = torch.tensor([3, 2, -1, 0, LONGEST + 1, 1])
    k, v = bench.random(6, 2, 4), bench.random(6, 2, 3)
    paged_write_at(keys, values, k, v, index, bench.step, bench.pages.trash_row)
    wanted = {int(bench.pages.rows(slot, at, at + 1)[0]): n for slot, at, n in ((first, 3, 0), (first, 2, 1))}
    wanted[int(bench.pages.rows(second, 0, 1)[0])] = 3
    for row, token in wanted.items():
        assert torch.equal(keys[row], k[token])
        assert torch.equal(values[row], v[token])
    changed = torch.nonzero((keys != before).flatten(1).any(1)[: bench.pages.trash_row]).flatten().tolist()
    assert sorted(wanted) == changed


# --- what planned kernels read --------------------------------------------------------------------------------------


def test_pages_are_listed_row_by_row():
    bench = Bench((KVGeometry(1, 4, 4),), [Row(9), Row(17, 3)])
    indptr = torch.tensor([0, 3, 8, 8, 8], dtype=torch.int32)
    indices = torch.full((10,), -7, dtype=torch.int32)
    list_pages(indices, indptr, bench.step)
    table = bench.pages.table
    assert indices.tolist() == [*table[bench.slots[0], :3], *table[bench.slots[1], :5], -7, -7]


def test_masks_are_packed_row_by_row():
    """Bits of a row run on from query to query; a row without keys has none, and each row begins with a byte."""
    rows = [CHAINS[2], TREES[0], TREES[1], Row(5, 4)]
    bench = Bench((KVGeometry(1, 4, 4),), rows)
    kv_len = [0, 24, 5, 9]
    sizes = [0, -(-7 * 24 // 8), -(-4 * 5 // 8), -(-4 * 9 // 8), 0, 0]
    indptr = torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32)
    bits = torch.full((int(indptr[-1]) + 2,), 0xA5, dtype=torch.uint8)
    pack_masks(bits, indptr, torch.tensor([*kv_len, 0, 0], dtype=torch.int32), bench.step)
    assert bits[-2:].tolist() == [0xA5] * 2
    for row, keys, start, size in zip(rows, kv_len, indptr.tolist(), sizes, strict=False):
        if keys:
            own = tree.ancestor_mask(row.parents) if row.parents else torch.ones(4, 4, dtype=torch.bool).tril()
            wanted = torch.cat([torch.ones(row.q_len, row.begin, dtype=torch.bool), own], dim=1).flatten()
            unpacked = np.unpackbits(bits[start : start + size].numpy(), bitorder="little")[: len(wanted)]
            assert unpacked.tolist() == wanted.tolist()


# --- FlashInfer's plans ---------------------------------------------------------------------------------------------


class StandIn:
    """`BatchPrefillWithPagedKVCacheWrapper` as its source says it behaves, by definition and on the CPU.

    It reads only what the kernels read: buffers, and of the plan what the scheduler would have cut by.
    """

    made: ClassVar[list["StandIn"]] = []

    def __init__(self, workspace, layout, backend, use_cuda_graph=False, **buffers) -> None:
        assert (layout, backend) == ("NHD", "fa2")
        self.static, self.rows = use_cuda_graph, 0
        self._float_workspace_buffer = workspace
        self._custom_mask_buf = buffers.get("custom_mask_buf")
        self._mask_indptr_buf = buffers.get("mask_indptr_buf")
        self.buffers = [
            buffers.get(name)
            for name in ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        ]
        self._cached_module = SimpleNamespace(plan=self._schedule)
        StandIn.made.append(self)

    def reset_workspace_buffer(self, float_workspace, int_workspace) -> None:
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace, int_workspace
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace)

    def plan(
        self, q_indptr, kv_indptr, indices, last_page, q_heads, kv_heads, dim, page_size,
        *, causal, window_left, q_data_type, seq_lens, max_token_per_sequence,
    ):  # fmt: skip
        widths = q_indptr.diff()
        assert max_token_per_sequence == int(widths.max())
        pages = kv_indptr.diff()
        assert torch.equal(seq_lens, torch.where(pages > 0, (pages - 1) * page_size + last_page, 0))
        self.shape = (q_heads, kv_heads, dim, page_size)
        self.causal, self.window_left, self.dtype = causal, window_left, q_data_type
        self.total = int(q_indptr[-1])
        if self.static:
            assert not len(indices)
            for buffer, given in zip(self.buffers, (q_indptr, kv_indptr, None, last_page), strict=True):
                if given is not None:
                    assert len(buffer) == len(given)
                    buffer.copy_(given)
        else:
            self.buffers = [q_indptr.clone(), kv_indptr.clone(), indices, last_page.clone()]
            self._custom_mask_buf = self._mask_indptr_buf = None
        self.planned = (q_indptr.tolist(), kv_indptr.tolist())

    def _schedule(
        self, workspace, ints, pinned, q_indptr, kv_indptr, kv_len, total, rows, q_heads, kv_heads, page_size,
        static, k_dim, v_dim, causal, window_left, fixed, unsplit, beside,
    ):  # fmt: skip
        assert static
        assert (total, rows, len(kv_len)) == (self.total, len(self.buffers[0]) - 1, rows)
        assert (q_heads, kv_heads, k_dim, page_size) == self.shape
        assert (causal, window_left, v_dim) == (self.causal, self.window_left, k_dim)
        assert (fixed, unsplit, beside) == (-1, False, 0)
        assert int(q_indptr[-1]) <= total
        self.planned = (q_indptr.tolist(), kv_indptr.tolist())
        return []

    def run(self, q, paged, *, q_scale, out, lse, return_lse) -> None:
        q_indptr, kv_indptr, indices, last_page = (buffer.tolist() for buffer in self.buffers)
        assert (q_indptr, kv_indptr) == self.planned, "the kernel was planned for other lengths than it reads"
        q_heads, kv_heads, dim, page_size = self.shape
        assert q.shape == (self.total, q_heads, dim)
        assert out.shape == q.shape
        assert q.dtype == out.dtype == self.dtype
        keys, values = paged
        for row in range(len(last_page)):
            pages = indices[kv_indptr[row] : kv_indptr[row + 1]]
            total = (len(pages) - 1) * page_size + last_page[row] if pages else 0
            k, v = (part[pages].flatten(0, 1)[:total].float() for part in (keys, values))
            mine = slice(q_indptr[row], q_indptr[row + 1])
            count = mine.stop - mine.start
            if not count:
                assert not total, "keys without queries are cut into chunks for nothing"
                continue
            seen = torch.ones(count, total, dtype=torch.bool)
            if self._custom_mask_buf is not None:
                assert not self.causal
                start = int(self._mask_indptr_buf[row])
                part = self._custom_mask_buf[start : start + -(-count * total // 8)].numpy()
                seen = torch.from_numpy(np.unpackbits(part, bitorder="little")[: count * total]).bool().view(count, -1)
            elif self.causal:
                seen = seen.tril(total - count)
            if self.window_left >= 0:
                at, key = torch.arange(count)[:, None], torch.arange(total)
                seen = seen & (key + count + self.window_left >= total + at)
            if not total:
                out[mine] = 0
                if return_lse:
                    lse[mine] = -5e4
                continue
            heads = q[mine].float().unflatten(1, (kv_heads, -1))
            scores = torch.einsum("qhgd,xhd->qhgx", heads, k) * dim**-0.5 * (1 if q_scale is None else q_scale)
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            out[mine] = torch.einsum("qhgx,xhd->qhgd", scores.softmax(-1), v).flatten(1, 2).to(out.dtype)
            if return_lse:
                lse[mine] = (scores.logsumexp(-1) / np.log(2)).flatten(1)


@pytest.fixture
def stand_in(monkeypatch):
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn


SERVED = KVGeometry(2, 64, 64, None, 8)
LAYERS = (SERVED, KVGeometry(2, 64, 64, 6, 8), KVGeometry(2, 6, 3, None, 8), KVGeometry(4, 64, 64, None, 8))
"""Served; served but with a window, which trees take to `paged`; never served; served with other heads."""
MIXED = [*CHAINS[:3], *TREES]


def _backend(bench: Bench) -> FlashInferBackend:
    return FlashInferBackend(bench.pool, bench.layers, bench.dtype, PAGE, SLOTS, bench.pages.table.shape[1], CPU)


def _compare(bench: Bench, attention, rows: Sequence[Row]) -> None:
    """Each layer against `paged`, which the tests above hold to the CPU's attention."""
    own = sum(row.q_len for row in rows)
    reference = PagedBackend(bench.pool).prepare(bench.step, "tree", static=False)
    for layer, scale in ((0, None), (1, None), (2, None), (3, 0.2)):
        q, k, v = bench.inputs(layer)
        wanted = reference.attend(layer, q, k, v, scale)
        found = attention.attend(layer, q, k, v, scale)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found[:own].float(), wanted[:own].float(), atol=2e-3, rtol=2e-3, msg=f"{layer}")


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("causal", CHAINS), ("tree", TREES), ("both", MIXED), ("split", MIXED), ("split", TREES)],
)
def test_each_kind_equals_the_paged_kernels(stand_in, monkeypatch, kind, rows, static):
    monkeypatch.setattr(planned, "SPLIT_ABOVE", 10 if kind == "split" else 100)
    bench = Bench(LAYERS, rows, dtype=torch.float16)
    backend = _backend(bench)
    assert backend.unserved == {2: "head dims of K (6) and V (3) differ"}
    host = bench.host()
    assert backend.kind(host) == kind
    attention = backend.prepare(bench.step, kind, static=static)
    attention.plan(host)
    attention.begin()
    _compare(bench, attention, rows)


@pytest.mark.parametrize("static", [True, False])
def test_a_plan_is_made_anew_for_each_step(stand_in, static):
    """The same bucket with other lengths, fewer tokens and fewer rows; its wrappers are made once."""
    bench = Bench(LAYERS, MIXED, dtype=torch.float16)
    backend = _backend(bench)
    attention = backend.prepare(bench.step, "both", static=static)
    count = len(stand_in.made)
    for rows in (MIXED, [*CHAINS[1:], TREES[2]], [Row(2), *TREES[:2]], MIXED):
        for slot, row in zip(bench.slots, rows, strict=False):
            assert bench.pages.reserve(slot, row.begin + row.q_len)
        other = bench.describe(rows, bench.step.rows, bench.step.total)
        for name in ("slots", "row_start", "begin", "drafted", "positions", "kv_rows", "ancestors", "tables"):
            getattr(bench.step, name).copy_(getattr(other, name))
        if not static:
            attention = backend.prepare(bench.step, "both", static=False)
        attention.plan(bench.host(rows))
        attention.begin()
        _compare(bench, attention, rows)
    assert len(stand_in.made) == count


def test_the_kind_of_a_step(stand_in, monkeypatch):
    bench = Bench(LAYERS, MIXED, dtype=torch.float16)
    backend = _backend(bench)
    assert backend.kinds(trees=False) == ("causal",)
    assert backend.kinds(trees=True) == ("causal", "tree", "both")  # no request is as long as a split needs
    host = bench.host()
    assert backend.kind(host) == "both"
    host.q_len[:3] = 0
    assert backend.kind(host) == "tree"
    monkeypatch.setattr(planned, "SPLIT_ABOVE", 30)
    assert backend.kinds(trees=True) == ("causal", "tree", "both", "split")
    # The mean over the trees' queries: rows of 7, 4 and 8 over 24, 5 and 48 keys.
    monkeypatch.setattr(planned, "SPLIT_ABOVE", (7 * 24 + 4 * 5 + 8 * 48) // 19 + 1)
    assert backend.kind(host) == "tree"
    host.begin[5] += 3
    assert backend.kind(host) == "split"
    host.q_len[3:] = 0
    assert backend.kind(host) == "causal"


def test_rows_out_of_order_and_pages_beyond_the_pool_are_caught(stand_in):
    bench = Bench(LAYERS, [TREES[0], Row(3)], dtype=torch.float16)
    attention = _backend(bench).prepare(bench.step, "both", static=True)
    with pytest.raises(AssertionError, match="rows without a tree stand before"):
        attention.plan(bench.host())
    host = bench.host()
    host.tree[:] = False
    host.begin[0] = 5000
    with pytest.raises(AssertionError, match="more pages than the pool has"):
        attention.plan(host)


@pytest.mark.parametrize(
    ("geometry", "dtype", "why"),
    [
        (SERVED, torch.bfloat16, ""),
        (SERVED, torch.float32, "not float32"),
        (KVGeometry(3, 96, 96, None, 9), torch.bfloat16, "head dim 96 is none of 64, 128, 256, 512"),
        (KVGeometry(1, 128, 64, None, 8), torch.bfloat16, r"K \(128\) and V \(64\) differ"),
        (KVGeometry(3, 64, 64, None, 8), torch.bfloat16, "8 query heads are no multiple of 3 KV heads"),
        (KVGeometry(3, 64, 64), torch.bfloat16, "not known"),
        (KVGeometry(3, 64, 64, 128, 9), torch.float16, ""),
        (KVGeometry(1, 512, 512, None, 8), torch.bfloat16, ""),
    ],
)
def test_what_flashinfer_serves(geometry, dtype, why):
    if why:
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(unsupported(geometry, dtype))
    else:
        assert unsupported(geometry, dtype) == ""


@pytest.mark.parametrize(
    ("rows", "total", "empty"),
    [(64, 512, 433), (32, 256, 209), (64, 72, 5), (64, 64, 0), (1, 8, 0), (8, 1024, 0), (256, 2048, 0)],
)
def test_empty_rows_make_the_tile_fit(rows, total, empty):
    # What FlashInfer's scheduler reads from them: the queries that one row could have, the others having one each.
    shape = KernelShape(32, 8, 128, None, torch.bfloat16, 16, causal=True, masked=False)
    assert shape.empty_rows(rows, total, processors=132) == empty
    if empty:
        group, each = 4, -(-total // rows) * 4
        assert each <= (total - rows - empty + 1) * group <= (16 if each <= 16 else 64)
