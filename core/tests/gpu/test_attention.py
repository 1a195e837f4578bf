"""Paged attention's Triton kernels, and FlashInfer's plans, against plain torch on the CPU, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specplug.models.base import KVGeometry
from specplug.runtime.attention import flashinfer as planned
from specplug.runtime.attention.backend import HostRows, PagedBackend
from specplug.runtime.attention.masks import list_pages, pack_masks
from specplug.runtime.attention.paged import PagedQueries, paged_attend, paged_write, paged_write_at, step_queries
from specplug.runtime.device.rows import StepRows, words_for
from specplug.runtime.kv import KVPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # FlashInfer's own, at import and while it compiles
]
needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
MIXED = {"begin": [300, 0, 37, 64, 5], "literal": [1, 70, 1, 1, 2], "drafted": [0, 0, 7, 12, 3]}
"""A decode, a prompt chunk, two rows with drafts, and one with two tokens before its drafts."""


def on_gpu(thing: Any) -> Any:
    """A copy of a dataclass of tensors, or of a tensor, on the GPU."""
    if isinstance(thing, Tensor):
        return thing.cuda()
    changes = {f.name: value.cuda() for f in fields(thing) if isinstance(value := getattr(thing, f.name), Tensor)}
    return replace(thing, **changes)


class Case:
    """A pool with scattered pages and rows over it, on the CPU; ancestors are any earlier tokens of the row."""

    def __init__(
        self,
        begin: Sequence[int],
        literal: Sequence[int],
        drafted: Sequence[int],
        *,
        pads: int = 3,
        page_size: int = 16,
        columns: int = 64,
        seed: int = 0,
        rows: int | None = None,
        total: int | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        count = len(begin)
        self.page_size, self.columns = page_size, columns
        self.slots = count + max(pads, 1) if rows is None else rows
        self.pages = self.slots * columns
        widths = np.add(literal, drafted)
        all_rows = count + pads if rows is None else rows
        all_tokens = int(widths.sum()) + pads if total is None else total
        behind = all_rows - count
        starts = np.cumsum([0, *widths, *[0] * behind])
        tables = torch.full((self.slots + 1, columns), self.pages, dtype=torch.int32)
        tables[:-1] = torch.from_numpy(rng.permutation(self.pages).reshape(self.slots, columns))
        slots = [*rng.permutation(self.slots)[:count], *[self.slots] * behind]
        token_row = np.full(all_tokens, self.slots)
        kv_rows = torch.full((all_tokens,), self.pages * page_size)
        positions = torch.zeros(all_tokens, dtype=torch.int64)
        ancestors = torch.zeros(all_tokens, words_for(max([8, *drafted])), dtype=torch.int64)
        for row, (start, width) in enumerate(zip(starts, widths, strict=False)):
            at = begin[row] + torch.arange(width)
            mine = slice(start, start + width)
            token_row[mine] = row
            kv_rows[mine] = tables[slots[row], at // page_size].long() * page_size + at % page_size
            positions[mine] = at
            for node in range(drafted[row]):
                own = literal[row] + node
                positions[start + own] -= int(rng.integers(0, node + 1))  # not as deep as far
                for token in [0, own, *np.flatnonzero(rng.random(own) < 0.4)]:
                    word, bit = int(token) // 64, int(token) % 64
                    ancestors[start + own, word] |= (1 << bit) - (1 << 64 if bit == 63 else 0)
        self.rows = StepRows(
            slots=torch.tensor(slots),
            row_start=torch.tensor(starts),
            begin=torch.tensor([*begin, *[0] * behind]),
            drafted=torch.tensor([*drafted, *[0] * behind]),
            token_row=torch.tensor(token_row),
            tokens=torch.zeros(all_tokens, dtype=torch.int64),
            positions=positions,
            kv_rows=kv_rows,
            ancestors=ancestors,
            tables=tables,
            page_size=page_size,
        )
        self.host = HostRows(
            np.array([*begin, *[0] * behind]),
            np.array([*widths, *[0] * behind]),
            np.array([*(np.array(drafted) > 0), *[False] * behind]),
        )

    @property
    def trash_row(self) -> int:
        return self.pages * self.page_size

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def pool(self, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        held = (self.pages + 1) * self.page_size
        return self.random(held, kv_heads, k_dim, dtype=dtype), self.random(held, kv_heads, v_dim, dtype=dtype)

    def fused(self, *shapes: tuple[int, int], dtype: torch.dtype, total: int | None = None) -> list[Tensor]:
        """Views [T, heads, dim] of one product."""
        sizes = [heads * dim for heads, dim in shapes]
        whole = self.random(self.rows.total if total is None else total, sum(sizes), dtype=dtype)
        return [part.unflatten(1, shape) for part, shape in zip(whole.split(sizes, dim=1), shapes, strict=True)]


def check(q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries, **how: Any) -> None:
    """Triton against torch; what neither may leave untouched is NaN at first."""
    wanted = paged_attend(
        q, keys, values, queries, **{k: v.clone() if isinstance(v, Tensor) else v for k, v in how.items()}
    )
    moved = {k: on_gpu(v) if isinstance(v, Tensor) else v for k, v in how.items()}
    if "out" not in moved:
        moved["out"] = torch.full(wanted.shape, torch.nan, dtype=wanted.dtype, device="cuda")
    strided = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="cuda").copy_(q)
    found = paged_attend(strided, on_gpu(keys), on_gpu(values), on_gpu(queries), **moved)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(found.cpu().float(), wanted.float(), atol=tolerance, rtol=tolerance)


SHAPES = [
    (32, 8, 128, 128, torch.bfloat16),
    (9, 3, 64, 64, torch.bfloat16),
    (9, 3, 64, 64, torch.float32),
    (8, 2, 96, 96, torch.float16),
    (4, 1, 256, 256, torch.bfloat16),
    (4, 2, 512, 512, torch.bfloat16),
    (4, 2, 256, 256, torch.float32),
    (71, 1, 64, 64, torch.bfloat16),
    (4, 2, 6, 3, torch.float32),
    (4, 4, 192, 128, torch.bfloat16),
]


@pytest.mark.parametrize(("heads", "kv_heads", "k_dim", "v_dim", "dtype"), SHAPES)
def test_a_step(heads, kv_heads, k_dim, v_dim, dtype):
    """Ragged rows and pads, with and without ancestors and windows, K and V written first."""
    case = Case(**MIXED, page_size=5 if k_dim == 96 else 16, columns=90)
    keys, values = case.pool(kv_heads, k_dim, v_dim, dtype)
    q, k, v = case.fused((heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim), dtype=dtype)
    moved = [part.cuda() for part in (keys, values)]
    fused = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1).cuda()
    sizes = [heads * k_dim, kv_heads * k_dim, kv_heads * v_dim]
    _, k_view, v_view = fused.split(sizes, dim=1)
    rows = on_gpu(case.rows)
    paged_write(*moved, k_view.unflatten(1, (kv_heads, -1)), v_view.unflatten(1, (kv_heads, -1)), rows.kv_rows)
    paged_write(keys, values, k, v, case.rows.kv_rows)
    for part, other in zip((keys, values), moved, strict=True):
        assert torch.equal(part[: case.trash_row], other.cpu()[: case.trash_row])
    for trees in (False, True):
        for window in (None, 1, 40):
            check(q, keys, values, step_queries(case.rows, trees=trees), window=window, scale=0.11)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("width", [1, 9])
def test_parts_of_long_keys_are_merged(rows, width):
    """From one row, cut into as many parts as there are, to more rows than multiprocessors."""
    begin = np.random.default_rng(rows).integers(0, 3000, rows).tolist()
    case = Case(begin, [width] * rows, [0] * rows, columns=200, pads=1, seed=rows)
    keys, values = case.pool(2, 64, 64, torch.float32)
    (q,) = case.fused((8, 64), dtype=torch.float32)
    for window in (None, 100):
        check(q, keys, values, step_queries(case.rows, trees=False), window=window)


def test_trees_wider_than_a_word():
    case = Case([200, 3], [1, 1], [150, 63])
    keys, values = case.pool(2, 64, 64, torch.float32)
    (q,) = case.fused((8, 64), dtype=torch.float32)
    for window in (None, 30):
        check(q, keys, values, step_queries(case.rows, trees=True), window=window)


@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uniform_patterns(q_len, dtype):
    """At offsets on both sides, before token 0 too, and with told scratch rows; pad rows read the trash page."""
    case = Case([40, 2, 0, 100], [1] * 4, [0] * 4)
    rows = case.rows
    keys, values = case.pool(2, 64, 48, dtype)
    (q,) = case.fused((8, 64), dtype=dtype, total=rows.rows * q_len)
    base = PagedQueries(rows.tables, rows.page_size, rows.slots, rows.begin, q_len=q_len)
    for sees in ("causal", "full"):
        for offset in (0, 1, -1, -30):
            for window in (None, 7):
                check(q, keys, values, replace(base, sees=sees, offset=offset), window=window)
    visible = torch.rand(rows.rows, q_len, 21, generator=case.generator) < 0.4
    visible[1, 0] = False
    positions = (rows.begin[:, None] + (visible.sum(-1) - 1).clamp_min(0)).flatten()
    for window in (None, 1, 7):
        check(q, keys, values, replace(base, sees="visible", visible=visible, positions=positions), window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_going_on_from_another_kernel(dtype):
    case = Case(**MIXED)
    keys, values = case.pool(2, 128, 128, dtype)
    (q,) = case.fused((8, 128), dtype=dtype)
    out = case.random(len(q), 8, 128, dtype=dtype)
    lse = torch.randn(len(q), 8, generator=case.generator) * 3
    lse[-10:-8], lse[-12:-10] = -torch.inf, -5e4  # nothing below, in both ways of writing it
    check(q, keys, values, step_queries(case.rows, trees=True), out=out, below_lse=lse)


def test_writes_by_index():
    case = Case(**MIXED)
    keys, values = case.pool(3, 96, 64, torch.bfloat16)
    for flat in (False, True):
        spread = torch.randperm(case.columns * case.page_size + 60, generator=case.generator) - 30
        count = case.rows.total if flat else case.rows.rows * 4
        index = spread[:count] if flat else spread[:count].view(-1, 4)
        k, v = case.fused((3, 96), (3, 64), dtype=torch.bfloat16, total=count)
        moved = [part.cuda() for part in (keys, values)]
        paged_write_at(*moved, k.cuda(), v.cuda(), index.cuda(), on_gpu(case.rows), case.trash_row)
        paged_write_at(keys, values, k, v, index, case.rows, case.trash_row)
        for part, other in zip((keys, values), moved, strict=True):
            assert torch.equal(part[: case.trash_row], other.cpu()[: case.trash_row])


def test_pages_and_masks():
    case = Case(**MIXED)
    rows, moved = case.rows, on_gpu(case.rows)
    width = rows.row_start.diff()
    kv_len = torch.where(rows.drafted > 0, rows.begin + width, 0)
    indptr, mask_indptr = (
        torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
        for counts in ((kv_len + 15) // 16, (width * kv_len + 7) // 8)
    )
    indices = torch.full((300,), -7, dtype=torch.int32)
    bits = torch.full((int(mask_indptr[-1]) + 9,), 0xA5, dtype=torch.uint8)
    indices_found, bits_found = indices.cuda(), bits.cuda()
    list_pages(indices_found, indptr.cuda(), moved)
    list_pages(indices, indptr, rows)
    assert torch.equal(indices_found.cpu(), indices)
    pack_masks(bits_found, mask_indptr.cuda(), kv_len.int().cuda(), moved)
    pack_masks(bits, mask_indptr, kv_len.int(), rows)
    assert torch.equal(bits_found.cpu(), bits)


# --- FlashInfer -----------------------------------------------------------------------------------------------------

GEOMETRIES = (
    KVGeometry(2, 64, 64, None, 8),
    KVGeometry(2, 64, 64, 33, 8),
    KVGeometry(1, 128, 128, None, 4),
    KVGeometry(2, 96, 96, None, 8),
)
"""Plain, with a window, other heads, and one that FlashInfer lacks."""
CHAINS = {"begin": [300, 0, 37], "literal": [1, 70, 1], "drafted": [0, 0, 0]}
TREES = {"begin": [37, 64, 500], "literal": [1, 1, 1], "drafted": [7, 12, 3]}


class Served:
    """A backend over a random pool of `GEOMETRIES`, and the step that it is held to."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rows = on_gpu(case.rows)
        held = (case.pages + 1) * case.page_size
        self.pool = KVPool(GEOMETRIES, held, torch.bfloat16, torch.device("cuda"))
        for part in (*self.pool.k, *self.pool.v):
            part.copy_(case.random(*part.shape, dtype=torch.bfloat16))
        self.backend = planned.FlashInferBackend(
            self.pool, GEOMETRIES, torch.bfloat16, case.page_size, case.slots, case.columns, torch.device("cuda")
        )
        self.inputs = []
        for layer in GEOMETRIES:
            shapes = ((layer.q_heads, layer.k_dim), (layer.kv_heads, layer.k_dim), (layer.kv_heads, layer.v_dim))
            sizes = [heads * dim for heads, dim in shapes]
            whole = case.random(case.rows.total, sum(sizes), dtype=torch.bfloat16).cuda()
            parts = whole.split(sizes, dim=1)
            self.inputs.append([part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)])

    def take(self, other: Case) -> None:
        """Let the tensors of the step hold another one's rows."""
        for f in fields(StepRows):
            mine, new = getattr(self.rows, f.name), getattr(other.rows, f.name)
            if isinstance(mine, Tensor) and f.name != "tables":
                mine.copy_(new)

    def run(self, attention: Any) -> list[Tensor]:
        attention.begin()
        return [attention.attend(layer, *parts).clone() for layer, parts in enumerate(self.inputs)]

    def check(self, found: list[Tensor], tokens: int) -> None:
        wanted = self.run(PagedBackend(self.pool).prepare(self.rows, "tree", static=False))
        for at, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert torch.isfinite(ours).all()
            torch.testing.assert_close(
                ours[:tokens], theirs[:tokens], atol=3e-2, rtol=3e-2, msg=lambda m, at=at: f"{at}: {m}"
            )


@needs_flashinfer
@pytest.mark.parametrize(
    ("kind", "rows"), [("causal", CHAINS), ("tree", TREES), ("both", MIXED), ("split", MIXED), ("split", TREES)]
)
@pytest.mark.parametrize("static", [True, False])
def test_each_kind_of_step(monkeypatch, kind, rows, static):
    monkeypatch.setattr(planned, "SPLIT_ABOVE", 20 if kind == "split" else 1000)
    case = Case(**rows)
    served = Served(case)
    assert set(served.backend.unserved) == {3}
    assert served.backend.kind(case.host) == kind
    attention = served.backend.prepare(served.rows, kind, static=static)
    attention.plan(case.host)
    served.check(served.run(attention), int(case.host.q_len.sum()))


@needs_flashinfer
@pytest.mark.parametrize("kind", ["causal", "both", "split"])
def test_a_captured_step_is_planned_again_and_replayed(monkeypatch, kind):
    """Lengths on both sides of a chunk's boundary, rows that come and go, wider and narrower ones."""
    monkeypatch.setattr(planned, "SPLIT_ABOVE", 10**6)  # `kind` is given here, so that only masks have to fit
    rng = np.random.default_rng(0)
    shape: dict[str, Any] = {"rows": 6, "total": 96, "columns": 160}

    def steps() -> list[dict[str, list[int]]]:
        found = [
            {"begin": [begin] * 6, "literal": [1] * 6, "drafted": [0] * 6} for begin in (0, 1023, 1024, 1032, 2047)
        ]
        for _ in range(6):
            count = int(rng.integers(1, 7))
            drafted = np.sort(rng.integers(0, 15, count) * (rng.random(count) < 0.6 if kind != "causal" else 0))
            found.append(
                {"begin": rng.integers(0, 2400, count).tolist(), "literal": [1] * count, "drafted": drafted.tolist()}
            )
        return found

    first = Case([5] * 6, [1] * 6, [0] * 6, **shape)
    served = Served(first)
    attention = served.backend.prepare(served.rows, kind, static=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention.plan(first.host)
        served.run(attention)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = served.run(attention)
        for step in steps():
            case = Case(**step, **shape)
            served.take(case)
            attention.plan(case.host)
            graph.replay()
            side.synchronize()
            served.check(found, int(case.host.q_len.sum()))
