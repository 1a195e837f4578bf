"""The drafters' view on the device against `PagedView`, the CPU engine's, whose own test is attention by definition."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from specplug.models.base import KVGeometry
from specplug.runtime.device.rows import StepRows
from specplug.runtime.device.views import DeviceView
from specplug.runtime.draft_kv import PagedView
from specplug.runtime.draft_kv import StepRows as HostRows
from specplug.runtime.kv import KVPool, PagePool

PAGE, LONGEST, SLOTS = 4, 40, 5
LAYERS = (KVGeometry(2, 6, 3), KVGeometry(1, 4, 4, window=3))
STEP = HostRows(slots=[2, 0, 4], begin=[5, 0, 9], q_len=[3, 6, 1], kv_len=[7, 6, 10])
"""A verify with one rejected draft, a prompt chunk, a decode."""


class Bench:
    """Two pools with the same contents and a view over each; the device's step has `pads` rows and tokens more."""

    def __init__(self, step: HostRows = STEP, pads: int = 2, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.pads = step, pads
        self.pages = PagePool(SLOTS, 40, PAGE, LONGEST)
        self.pages._free = np.random.default_rng(seed).permutation(40).tolist()
        for slot, kv_len in zip(step.slots, step.kv_len, strict=True):
            assert self.pages.reserve(slot, kv_len + 12)
        self.pool, self.host_pool = self._pool(), self._pool()
        for part, other in zip(self._parts(self.pool), self._parts(self.host_pool), strict=True):
            part.copy_(self.random(*part.shape))
            other.copy_(part)
        self.host = PagedView(self.host_pool, self.pages, writable=True)
        self.host.begin(step)
        self.view = DeviceView(self.pool, self.pages.trash_row, writable=True)
        self.rows = self._rows()
        self.view.begin(self.rows, torch.tensor([*step.kv_len, *[0] * pads]))

    def _pool(self) -> KVPool:
        return KVPool(LAYERS, self.pages.rows_with_trash, torch.float32, torch.device("cpu"))

    @staticmethod
    def _parts(pool: KVPool) -> list[Tensor]:
        return [*pool.k, *pool.v]

    def _rows(self) -> StepRows:
        step, pads = self.step, self.pads
        count, total = len(step.slots), sum(step.q_len)
        tables = torch.full((SLOTS + 1, self.pages.table.shape[1]), self.pages.pages, dtype=torch.int32)
        tables[:SLOTS] = torch.from_numpy(self.pages.table)
        own = [
            self.pages.rows(slot, begin, begin + q_len)
            for slot, begin, q_len in zip(step.slots, step.begin, step.q_len, strict=True)
        ]
        starts = np.cumsum([0, *step.q_len])
        return StepRows(
            slots=torch.tensor([*step.slots, *[SLOTS] * pads]),
            row_start=torch.tensor([*starts, *[total] * pads]),
            begin=torch.tensor([*step.begin, *[0] * pads]),
            drafted=torch.zeros(count + pads, dtype=torch.int64),
            token_row=torch.tensor([*np.repeat(np.arange(count), step.q_len), *[SLOTS] * pads]),
            tokens=torch.zeros(total + pads, dtype=torch.int64),
            positions=torch.zeros(total + pads, dtype=torch.int64),
            kv_rows=torch.tensor([*np.concatenate(own), *[self.pages.trash_row] * pads]),
            ancestors=None,
            tables=tables,
            page_size=PAGE,
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def padded(self, part: Tensor, each: int = 1) -> Tensor:
        """`part` with `each` rows of anything behind it for each pad."""
        return torch.cat([part, self.random(self.pads * each, *part.shape[1:])])

    def check(
        self, layer: int, name: str, q_len: int | None, *, scale: float | None = None, seen: Tensor | None = None, **how
    ):
        """Attend through both views; a query before token 0 means nothing and has to be a number only."""
        q = self.random(sum(self.step.q_len) if q_len is None else len(self.step.slots) * q_len, 4, LAYERS[layer].k_dim)
        more = None
        if seen is not None:
            more = torch.cat([seen, torch.rand(self.pads, *seen.shape[1:], generator=self.generator) < 0.5])
        wanted = self.host.attend(self.host.pattern(name, q_len, **how), layer, q, seen, scale)
        pattern = self.view.pattern(name, q_len, **how)
        found = self.view.attend(pattern, layer, self.padded(q, q_len or 1), more, scale)
        assert torch.isfinite(found).all()
        first = self.step.begin if q_len is None else self.step.kv_len
        widths = self.step.q_len if q_len is None else [q_len] * len(first)
        at = [start + how.get("offset", 0) + n for start, n_of in zip(first, widths, strict=True) for n in range(n_of)]
        means = torch.tensor(at) >= 0
        assert means.any()
        torch.testing.assert_close(found[: len(q)][means], wanted[means], atol=1e-5, rtol=1e-5, msg=f"{name} {how}")

    def check_pools(self) -> None:
        """The pools hold the same, but for the trash page."""
        for part, other in zip(self._parts(self.pool), self._parts(self.host_pool), strict=True):
            assert torch.equal(part[: self.pages.trash_row], other[: self.pages.trash_row])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_uniform_patterns_equal_the_hosts(mask, layer):
    bench = Bench()
    for q_len in (1, 4):
        for offset in (0, 1, 3, -1, -2, -8):
            for window in (None, 1, 2, 100):
                name = f"{q_len} {offset} {window}"
                bench.check(layer, name, q_len, mask=mask, offset=offset, window=window)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("offset", [0, -1, -3])
def test_the_steps_own_rows_equal_the_hosts(offset, layer):
    Bench().check(layer, "rows", None, offset=offset, scale=0.7)


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("layer", [0, 1])
def test_told_scratch_rows_equal_the_hosts(layer, window):
    bench = Bench()
    for at in range(4):
        seen = torch.rand(3, 3, 6, generator=bench.generator) < 0.4
        bench.check(layer, f"level {at}", 3, mask="ancestors", window=window, seen=seen)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_equal_the_hosts(seed):
    """Rows of any length, a slot without pages beyond its tokens, no pads at all in some."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, SLOTS + 1))
    begin, q_len = rng.integers(0, 12, count), rng.integers(1, 8, count)
    kept = np.array([rng.integers(1, width + 1) for width in q_len])
    step = HostRows(rng.permutation(SLOTS)[:count].tolist(), begin.tolist(), q_len.tolist(), (begin + kept).tolist())
    bench = Bench(step, pads=seed % 3, seed=seed)
    for layer in (0, 1):
        bench.check(layer, f"rows {layer}", None)
        bench.check(layer, f"next {layer}", 2, mask="full", offset=1)
        seen = torch.rand(count, 2, 5, generator=bench.generator) < 0.5
        bench.check(layer, f"told {layer}", 2, mask="ancestors", seen=seen)


@pytest.mark.parametrize("layer", [0, 1])
def test_writes_equal_the_hosts(layer):
    """At the tokens' own indices, at [R, q_len] and at [T] indices; below 0 and beyond the table: nowhere."""
    bench, geometry = Bench(), LAYERS[layer]
    for index in (
        None,
        torch.tensor([[7, -1], [0, 11], [-3, 400]]),
        torch.tensor([4, 5, 6, -1, 0, 1, 2, 39, 40, 8]),
    ):
        count = 10 if index is None else index.numel()
        k, v = bench.random(count, geometry.kv_heads, geometry.k_dim), bench.random(count, geometry.kv_heads, 4)
        v = v[..., : geometry.v_dim]  # a view with gaps
        bench.host.write(layer, k, v, index)
        each = 1 if index is None or index.ndim == 1 else index.shape[1]
        if index is not None:
            # What stands in pads is anything; it must not get into the pages of anybody.
            index = torch.cat([index, torch.zeros(bench.pads, *index.shape[1:], dtype=torch.int64)])
        bench.view.write(layer, bench.padded(k, each), bench.padded(v, each), index)
        bench.check_pools()


def test_a_slot_without_pages_is_written_nowhere_and_read_as_numbers():
    bench = Bench()
    bench.pages.release(2)
    bench.rows.tables[2] = bench.pages.pages
    bench.rows.kv_rows[:3] = bench.pages.trash_row
    before = [part.clone() for part in bench._parts(bench.pool)]
    index = torch.tensor([[7], [8], [9], [0], [0]])
    bench.view.write(0, bench.random(5, 2, 6), bench.random(5, 2, 3), index)
    for old, new in zip(before, bench._parts(bench.pool), strict=True):
        changed = set(torch.nonzero((old != new).flatten(1).any(1)[: bench.pages.trash_row]).flatten().tolist())
        assert changed <= {*bench.pages.rows(0, 8, 9).tolist(), *bench.pages.rows(4, 9, 10).tolist()}
    found = bench.view.attend(bench.view.pattern("it", 1), 0, bench.random(5, 4, 6))
    assert torch.isfinite(found).all()


def test_a_step_is_read_anew_from_the_same_tensors():
    """What a captured graph relies on: `begin` once, then other contents."""
    bench = Bench()
    pattern = bench.view.pattern("it", 1)
    q = bench.random(5, 4, 6)
    kv_len = torch.tensor([7, 6, 10, 0, 0])
    bench.view.begin(bench.rows, kv_len)
    before = bench.view.attend(pattern, 0, q)
    kv_len[1] = 3
    after = bench.view.attend(pattern, 0, q)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.allclose(before[1], after[1])


def test_wrong_uses_are_named():
    bench = Bench()
    view = bench.view
    causal = view.pattern("causal", 1)
    tree = view.pattern("tree", 1, mask="ancestors")
    seen = torch.ones(5, 1, 1, dtype=torch.bool)
    q = bench.random(5, 2, 6)
    refused: Sequence[tuple] = (
        (lambda: view.pattern("causal", 2), "declared twice"),
        (lambda: view.pattern("rows", None, offset=1), "at their own indices or earlier"),
        (lambda: view.pattern("rows", None, mask="full"), "causal"),
        (lambda: view.pattern("other", 2, mask="ancestors", offset=1), "offset 1 means nothing"),
        (lambda: view.attend(causal, 0, q, seen), "belongs to 'ancestors'"),
        (lambda: view.attend(tree, 0, q), "belongs to 'ancestors'"),
        (lambda: Bench().view.attend(causal, 0, q), "was not declared by this view"),
        (lambda: view.attend(causal, 0, q[:3]), "3 queries where the step has 5"),
        (lambda: view.write(0, q, q, torch.tensor([[1, 2]] * 5)), "5 rows of K for 10 token indices"),
        (lambda: view.write(0, q, q, torch.tensor([[1]])), r"index \[1, 1\]: expected \[5, q_len\] or \[12\]"),
        (lambda: view.write(0, q, q, torch.tensor([1, 2, 3])), r"index \[3\]"),
    )
    for wrong, says in refused:
        with pytest.raises(ValueError, match=says):
            wrong()
    with pytest.raises(RuntimeError, match="read-only"):
        DeviceView(bench.pool, 0, writable=False).write(0, q, q)
